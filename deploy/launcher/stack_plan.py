"""The resources and child processes of a stack: its folder, sockets, ports and commands."""

import contextlib
import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from deploy.launcher import service_flags
from deploy.launcher.process import COMMAND, ChildSpec, worker_spec
from deploy.launcher.service_flags import LOOPBACK
from deploy.launcher.settings import LaunchSettings
from gateway.settings import Settings as GatewaySettings
from protos.errors import ConfigurationRefused
from protos.service import private_files
from protos.service.grpc_options import MAX_SOCKET_PATH_BYTES
from scheduler_svc.settings import Settings as SchedulerSettings
from worker_svc.settings import Settings as WorkerSettings

# As long as the longest name of a socket.
_LONGEST_NAME = "metrics/0123456789ab.sock"
_LOCK = "launcher.pid"
# Files of running services.
_RUNNING = ("*.pid", "*.sock", "metrics/*.sock")


def with_run_dir(settings: LaunchSettings) -> LaunchSettings:
    """Returns the settings with a run dir of the HTTP port's if another launcher uses the default one.

    Raises:
        ConfigurationRefused: With `--secure`, the order of starts would decide which keys a stack has.
    """
    if "run_dir" in settings.model_fields_set or not (settings.run_dir / _LOCK).exists():
        return settings
    with contextlib.suppress(OSError), (settings.run_dir / _LOCK).open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if settings.secure:
                raise ConfigurationRefused(
                    f"the run dir {settings.run_dir} is in use by another `triptych up`; with --secure, give this"
                    " stack a --run-dir, which keeps its keys from start to start"
                ) from None
            return settings.model_copy(update={"run_dir": Path(f"{settings.run_dir}-{settings.port}")})
    return settings


@contextmanager
def claim(run_dir: Path, *, clean: bool = True) -> Iterator[None]:
    """Creates and locks the run dir.

    `clean` removes the files of earlier launchers, and at the end those of this one, except logs.

    Raises:
        ConfigurationRefused: Another launcher uses the folder, others may write to it, or we cannot.
    """
    try:
        private_files.make_folder(run_dir, "the run dir", "choose another --run-dir", mode=0o755)
        # Unbuffered: what a full disk refuses must not be written again when the file is closed.
        lock = private_files.open_binary(run_dir / _LOCK, "a+b", buffering=0)
    except OSError as error:
        raise _unwritable(run_dir, error) from error
    with lock:
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.05)  # another start may just be looking, see `with_run_dir`
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            other = lock.read().decode().strip()
            raise ConfigurationRefused(
                f"the run dir {run_dir} is in use by another `triptych up` (pid {other}); choose another --run-dir"
            ) from None
        if clean:
            _remove(run_dir, "*.log", *_RUNNING)
        try:
            try:
                lock.truncate(0)
                lock.write(f"{os.getpid()}\n".encode())
            except OSError as error:
                raise _unwritable(run_dir, error) from error
            yield
        finally:
            # A killed service leaves its socket.
            _remove(run_dir, *(_RUNNING if clean else ()))
            (run_dir / _LOCK).unlink(missing_ok=True)


def _remove(run_dir: Path, *patterns: str) -> None:
    for stale in (path for pattern in patterns for path in run_dir.glob(pattern) if path.name != _LOCK):
        with contextlib.suppress(FileNotFoundError):
            stale.unlink()


def _unwritable(run_dir: Path, error: OSError) -> ConfigurationRefused:
    return ConfigurationRefused(f"cannot write to the run dir {run_dir}: {error.strerror}")


@contextmanager
def socket_folder(run_dir: Path) -> Iterator[Path]:
    """Yields the absolute folder of the services' Unix sockets.

    It is the run dir or, if its path is too long for a socket, a new folder, removed at the end.
    """
    folder = run_dir.absolute()
    if len(os.fsencode(folder / _LONGEST_NAME)) <= MAX_SOCKET_PATH_BYTES:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="triptych-") as short:
        yield Path(short)


@dataclass(frozen=True)
class Ports:
    """The ports of a stack."""

    http: int | None
    """All gateways'; None with a Unix socket."""
    scheduler: int | None
    """For direct gRPC clients."""
    masters: tuple[int, ...]
    """Where the ranks of each replica meet; none for replicas of one rank."""
    metrics: tuple[int | None, ...]
    """Each gateway's own; None for a single gateway with a port that was given none."""


@contextlib.contextmanager
def free_ports(settings: LaunchSettings) -> Iterator[Ports]:
    """Yields free ports for the services, and holds them until the block ends.

    Raises:
        ConfigurationRefused: A requested address is in use or does not belong to this machine.
    """
    with contextlib.ExitStack() as stack:

        def hold(host: str, port: int, flag: str) -> int:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                server = stack.enter_context(socket.create_server((host, port), family=family))
            except OSError as error:
                reason = error.strerror or error
                raise ConfigurationRefused(
                    f"cannot listen on {host} port {port}: {reason}; choose another with {flag}"
                ) from error
            return int(server.getsockname()[1])

        def metrics_port(index: int) -> int | None:
            first = settings.metrics_port
            if first is None and settings.gateways == 1:
                return None
            return hold(settings.http_host, first + index if first else 0, "--metrics-port")

        direct, ranks = settings.scheduler_port, settings.layout.world_size
        yield Ports(
            None if settings.uds else hold(settings.host, settings.port, "--port or --host"),
            None if direct is None else hold(LOOPBACK, direct, "--scheduler-port"),
            tuple(hold(LOOPBACK, 0, "") for _ in range(settings.workers if ranks > 1 else 0)),
            tuple(metrics_port(index) for index in range(settings.gateways)),
        )


@dataclass(frozen=True)
class StackPlan:
    """The children of a stack; nothing runs yet."""

    ports: Ports
    scheduler_socket: Path
    gateways: tuple[ChildSpec, ...]
    scheduler: ChildSpec
    workers: tuple[ChildSpec, ...]
    """Replica by replica, and rank by rank within each."""

    @classmethod
    def make(cls, settings: LaunchSettings, sockets: Path) -> Self:
        """Chooses ports and builds the commands; `sockets` is the absolute folder of the Unix sockets.

        Raises:
            ConfigurationRefused: A requested address is not free, or too few NPUs are visible.
        """
        socket = sockets / "scheduler.sock"
        with free_ports(settings) as ports:
            return cls(
                ports,
                socket,
                _gateways(settings, ports, socket),
                _scheduler(settings, ports, socket),
                _workers(settings, ports, sockets, socket),
            )


def _gateways(settings: LaunchSettings, ports: Ports, socket: Path) -> tuple[ChildSpec, ...]:
    secrets, specs = service_flags.secrets_of(settings, GatewaySettings), []
    for index, metrics in enumerate(ports.metrics):
        name = "gateway" if settings.gateways == 1 else f"gateway-{index}"
        flags = service_flags.gateway_flags(settings, ports.http, metrics, socket)
        specs.append(ChildSpec(name, (*COMMAND, "gateway", *flags), settings.run_dir, secrets))
    return tuple(specs)


def _scheduler(settings: LaunchSettings, ports: Ports, socket: Path) -> ChildSpec:
    flags = service_flags.scheduler_flags(settings, ports.scheduler, socket)
    secrets = service_flags.secrets_of(settings, SchedulerSettings)
    return ChildSpec("scheduler", (*COMMAND, "scheduler", *flags), settings.run_dir, secrets)


def _workers(settings: LaunchSettings, ports: Ports, sockets: Path, socket: Path) -> tuple[ChildSpec, ...]:
    secrets, ranks = service_flags.secrets_of(settings, WorkerSettings), settings.layout.world_size
    specs = []
    for index in range(settings.workers * ranks):
        replica, rank = divmod(index, ranks)
        name = f"worker-{replica}" if ranks == 1 else f"worker-{replica}-rank-{rank}"
        own, master = sockets / f"{name}.sock", ports.masters[replica] if ranks > 1 else None
        flags = service_flags.worker_flags(settings, own, socket, index=index, master=master)
        variables = {**service_flags.worker_environment(settings, index), **secrets}
        specs.append(worker_spec(name, tuple(flags), settings.run_dir, variables))
    return tuple(specs)
