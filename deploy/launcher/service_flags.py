"""Translates the launcher's settings into the command line of each service."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from deploy.launcher.settings import LaunchSettings
from gateway.settings import Settings as GatewaySettings
from protos.errors import ConfigurationRefused
from protos.service.grpc_options import unix_address
from protos.service.settings import ServiceSettings, is_secret, reference_variables
from scheduler_svc.settings import Settings as SchedulerSettings
from worker_svc.devices.registry import DEVICES, RBLN, may_have_npus
from worker_svc.model_files.loader import display_name
from worker_svc.settings import Settings as WorkerSettings

LOOPBACK = "127.0.0.1"
"""Address of the scheduler, in addition to its Unix socket, and of the ranks' meeting."""


def gateway_flags(
    settings: LaunchSettings, port: int | None, metrics_port: int | None, scheduler: Path
) -> list[str]:
    """Returns the flags of a gateway. Only gateways listen where HTTP clients connect."""
    return flags_of(
        GatewaySettings,
        settings,
        host=settings.http_host,
        port=port,
        metrics_port=metrics_port,
        reuse_port=settings.gateways > 1 or None,
        metrics_folder=scheduler.with_name("metrics") if settings.gateways > 1 else None,
        scheduler_address=unix_address(scheduler),
        log_format="json",
    )


def scheduler_flags(
    settings: LaunchSettings, port: int | None = None, socket: Path | None = None
) -> list[str]:
    """Returns the scheduler's flags. Gateways and workers use the socket; direct gRPC clients, the port."""
    return flags_of(
        SchedulerSettings,
        settings,
        expect_model=display_name(settings.model),
        host="" if port is None else LOOPBACK,
        port=port,
        socket=socket,
        log_format="json",
    )


def worker_flags(
    settings: LaunchSettings,
    socket: Path | None = None,
    scheduler: Path | None = None,
    *,
    index: int = 0,
    master: int | None = None,
) -> list[str]:
    """Returns the flags of a worker. Workers share the cores equally unless `cpu_threads` is set.

    Args:
        settings: the launcher's.
        socket: the worker's only address.
        scheduler: the scheduler's socket.
        index: place of the worker in `StackPlan.workers`.
        master: the port where the ranks of its replica meet; `None` for a rank that compiles alone.
    """
    shared: dict[str, object] = {}
    ranks = settings.layout.world_size
    if settings.workers * ranks > 1 and settings.cpu_threads is None:
        shared["cpu_threads"] = max(1, len(os.sched_getaffinity(0)) // (settings.workers * ranks))
    if ranks > 1:
        replica, rank = divmod(index, ranks)
        shared |= {"rank": rank, "replica_id": f"replica-{replica}", "local_rank": index}
        shared["master"] = None if master is None else f"{LOOPBACK}:{master}"
    return flags_of(
        WorkerSettings,
        settings,
        model=settings.model,
        host="",
        port=None,
        socket=socket,
        scheduler_address=unix_address(scheduler) if scheduler else "",
        log_format="json",
        **shared,
    )


def worker_environment(settings: LaunchSettings, index: int) -> dict[str, str]:
    """Returns the variables with the devices of the `index`-th worker.

    GPUs of a replica must see one another, so their ranks choose by `--local-rank` instead. Workers use the
    devices in the launcher's own environment. They share GPUs if there are too few; too few NPUs are refused.
    """
    spec = DEVICES.get(settings.device)
    if spec is None and may_have_npus():
        spec = RBLN  # `auto` may become an NPU; other devices ignore the variable of NPUs.
    if spec is None or not spec.visible_by or settings.device_options.is_simulated:
        return {}
    if spec.is_exclusive:
        return _npus(settings, spec.visible_by, index)
    if settings.layout.world_size > 1 or settings.workers == 1:
        return {}
    variable = spec.visible_by[0]
    visible = _names(variable)
    return {variable: visible[index % len(visible)] if visible else str(index)}


def _npus(settings: LaunchSettings, variables: Sequence[str], index: int) -> dict[str, str]:
    """Returns the variable with a worker's NPUs: as many as work together as its device."""
    workers, each = settings.workers * settings.layout.world_size, settings.rbln_num_devices_per_local_rank
    variable = next((name for name in variables if _names(name)), variables[0])
    visible = _names(variable)
    if visible and len(visible) < workers * each:
        raise ConfigurationRefused(
            f"{variable}={','.join(visible)} lists {len(visible)} NPUs, but {workers * each} are needed, {each} for"
            " each worker process; list more, or lower --workers, the ranks or --rbln-num-devices-per-local-rank"
        )
    if workers == 1:
        return {}
    own = range(index * each, (index + 1) * each)
    return {variables[0]: ",".join(visible[place] if visible else str(place) for place in own)}


def _names(variable: str) -> list[str]:
    """Returns the devices that a variable of the launcher's environment lists."""
    return [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]


def flags_of(
    service: type[ServiceSettings], settings: ServiceSettings, **launcher_values: object
) -> list[str]:
    """Returns the user's settings of a service, overridden by the launcher's values.

    Other settings are omitted: the service applies its own defaults.
    """
    given = [name for name in service.model_fields if name in settings.model_fields_set]
    values = {name: getattr(settings, name) for name in given} | launcher_values
    shown = {name: value for name, value in values.items() if not is_secret(service, name)}
    return [written(name, value) for name, value in shown.items() if value is not None]


def secrets_of(settings: ServiceSettings, service: type[ServiceSettings]) -> dict[str, str]:
    """Returns the variables of a service's secret settings: other users of the machine would see flags.

    Those of other services' secrets are empty, so that a worker, which may run a model's own code, inherits
    no key of the gateway.
    """
    cls, variables = type(settings), dict[str, str]()
    for name in cls.model_fields:
        if is_secret(cls, name):
            value = getattr(settings, name) if is_secret(service, name) else None
            variables |= dict.fromkeys(reference_variables(cls, name), "")
            if isinstance(value, tuple):
                text = json.dumps([each.get_secret_value() for each in value]) if value else ""
            else:
                text = value.get_secret_value() if value else ""
            variables[f"TRIPTYCH_{name.upper()}"] = text
    return variables


def written(name: str, value: object) -> str:
    """Returns a flag that `protos.service.settings.load` reads back as `value`."""
    flag = f"--{name.replace('_', '-')}"
    match value:
        case bool():
            return flag if value else f"--no-{flag[2:]}"
        case tuple():
            return f"{flag}={','.join(map(str, value))}"
        case dict():
            return f"{flag}={json.dumps(value)}"
        case BaseModel():
            return f"{flag}={value.model_dump_json(exclude_unset=True)}"
        case _:
            return f"{flag}={value}"
