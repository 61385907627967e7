"""The settings of launchers: those of the services that they start, and a few of their own."""

import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from gateway.settings import Settings as GatewaySettings
from protos.errors import ConfigurationRefused
from protos.service import environment
from protos.service.settings import Group, ServiceSettings, fixed_fields
from scheduler_svc.settings import Settings as SchedulerSettings
from worker_svc.settings import Settings as WorkerSettings

if TYPE_CHECKING:
    from deploy.secure_files import SecureFiles

_WILDCARDS: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared, not bound


class StandbySettings(ServiceSettings):
    """How a launcher replaces dead workers."""

    model_config = SettingsConfigDict(use_attribute_docstrings=True)

    groups: ClassVar[Mapping[Group, tuple[str, ...]]] = {Group.LAUNCHER: ("standby_workers",)}

    standby_workers: int = Field(1, ge=0, le=64)
    """Standbys for all workers together: processes with a worker's imports done. A standby replaces a
    crashed worker and shortens recovery. Each takes about 450 MiB and holds no device. With several ranks,
    there are this many for each rank of a replica. 0: none."""


class KeepWorkerSettings(StandbySettings, WorkerSettings):
    """Runs a worker and restarts it when it dies: the command of the worker's image."""

    model_config = SettingsConfigDict(cli_prog_name="triptych keep-worker")

    port: int = Field(50061, ge=1, le=65535)
    """Port that the worker listens on."""


class LaunchSettings(StandbySettings, GatewaySettings, SchedulerSettings, WorkerSettings):
    """Serves one model on this machine: starts a gateway, a scheduler and workers, and keeps them running.

    The class inherits every setting of a service, with its name, type, bounds, default and variable. A name
    shared by services is set for all of them, except `host` and `port`, which are the gateway's here.
    """

    model_config = SettingsConfigDict(cli_prog_name="triptych up")

    groups: ClassVar[Mapping[Group, tuple[str, ...]]] = {
        Group.ADDRESSES: ("scheduler_port",),
        Group.LAUNCHER: ("workers", "gateways", "run_dir", "max_log_mb", "secure"),
    }
    fixed: ClassVar[Mapping[str, str]] = {
        "expect_model": "it is the --model of the launcher",
        "scheduler_address": "the launcher knows where its scheduler listens",
        "reuse_port": "the launcher knows how many gateways share the port",
        "metrics_folder": "the launcher chooses the folder of gateways that share the port",
        "rank": "the launcher numbers the ranks of each replica",
        "world_size": "it follows from --tensor-parallel-size and --pipeline-parallel-size",
        "local_rank": "the launcher gives each rank a device of its own",
        "replica_id": "the launcher names the replicas",
        "master": "the launcher chooses where ranks meet",
        "socket": "the launcher chooses a path for each service",
        "advertise_host": "all services run on this machine",
        "log_format": "the launcher reads its services' progress from JSON logs; a service started alone takes json or console",
    }

    needs_master: ClassVar[bool] = False
    common: ClassVar[tuple[str, ...]] = (
        "model", "served_model_name", "host", "port", "device", "dtype", "max_model_len", "max_num_seqs", "kv_memory",
        "tensor_parallel_size", "workers", "gateways", "tool_call_parser", "reasoning_parser", "enable_lora",
        "lora_modules", "api_key_file", "secure", "run_dir", "log_level",
    )  # fmt: skip
    positional: ClassVar[str] = "model"
    section: ClassVar[str] = "launcher"
    file_names: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "scheduler": {"host": "", "port": "scheduler_port"},
        "worker": {"host": "", "port": ""},
    }

    model: str = Field("smollm2", min_length=1)
    """smollm2, gemma3-270m, minilm, a Hugging Face id, a local folder or a .gguf file."""
    scheduler_port: int | None = Field(None, ge=0, le=65535)
    """Port for direct gRPC clients of this machine, for example 50051; 0 takes a free port. Default: none;
    they use the Unix socket that the launcher prints. Calls need the service token."""
    workers: int = Field(1, ge=1, le=64)
    """Number of replicas. Each is a worker, or --tensor-parallel-size times --pipeline-parallel-size of
    them."""
    gateways: int = Field(1, ge=1, le=64)
    """Number of gateway processes on the HTTP port. A process sends tens of thousands of tokens a second.
    Each serves `/metrics` and `/health` on a port of its own: `--metrics-port` and the ports after it, or
    free ports, which the launcher prints."""
    run_dir: Path = Path("run")
    """Folder for pid files, logs, sockets and secrets. Default: run, or run-PORT while another launcher uses
    that; with --secure it must then be given."""
    secure: bool = False
    """Protect everything: HTTPS with an API key, and TLS, client certificates and a service token between
    services. Makes what is needed in `secure/` in the run dir, and reuses it in later starts. Without it, a
    token made there still keeps strangers from the services."""
    max_log_mb: int = Field(64, ge=1, le=65536)
    """MiB above which a service's log is moved to `.log.1` and starts again."""

    @property
    def http_host(self) -> str:
        """Address of the gateways' ports; with a Unix socket the only port is for metrics."""
        return self.host if self.uds is None else "127.0.0.1"

    @model_validator(mode="after")
    def _adapters_can_run(self) -> Self:
        if self.lora_modules and not self.enable_lora:
            raise ValueError("--lora-modules needs --enable-lora; add it, or omit the adapters")
        return self

    @model_validator(mode="after")
    def _metrics_ports_exist(self) -> Self:
        if (self.metrics_port or 0) + self.gateways > 65536:
            raise ValueError(
                f"--metrics-port {self.metrics_port} leaves no port for each of {self.gateways} gateways; lower it"
            )
        return self

    @model_validator(mode="after")
    def _one_gateway_has_a_socket(self) -> Self:
        if self.uds is not None and self.gateways > 1:
            raise ValueError(
                f"--uds is the socket of one gateway, and --gateways is {self.gateways}; omit one"
            )
        return self


def secured(settings: LaunchSettings) -> "tuple[LaunchSettings, SecureFiles]":
    """Makes a service token in the run dir, and the other files of `--secure`; returns settings with them.

    The user's own settings stay. Only holders of the token can call the services: without it, any process of
    this machine could register a worker, or use the services past the gateway's keys.
    """
    from deploy.secure_files import SERVICE_NAME, make  # needs cryptography

    folder = settings.run_dir.absolute() / "secure"
    # A machine's name may have letters that certificates cannot have; the user has not chosen it here.
    names = [name for name in (socket.gethostname(),) if name.isascii()]
    hosts = [*names, *([] if settings.host in _WILDCARDS else [settings.host])]
    try:
        files = make(folder, hosts, only_token=not settings.secure)
    except OSError as error:
        raise ConfigurationRefused(f"cannot write {folder}: {error.strerror}") from error
    added: dict[str, Path | str | bool] = {}
    if settings.service_token is None and settings.service_token_file is None:
        added["service_token_file"] = files.service_token
    if settings.secure and settings.grpc_tls_ca is None:
        added |= {
            "grpc_tls_ca": files.ca,
            "grpc_tls_cert": files.service_cert,
            "grpc_tls_key": files.service_key,
            "grpc_tls_name": SERVICE_NAME,
            "grpc_tls_require_client_cert": True,
        }
    if settings.secure and settings.ssl_certfile is None:
        added |= {"ssl_certfile": files.http_cert, "ssl_keyfile": files.http_key}
    if settings.secure and not settings.api_key and settings.api_key_file is None:
        added["api_key_file"] = files.api_keys
    return settings.model_copy(update=added), files


def check_variables(variables: Mapping[str, str], report: Callable[[str], None]) -> None:
    """Reports variables without effect on the launcher; refuses some."""
    environment.check(variables, lambda reading: report(str(reading)))
    for field, reason in fixed_fields(LaunchSettings).items():
        if variables.get(name := f"TRIPTYCH_{field.upper()}"):
            report(f"{name} has no effect here: {reason}")
