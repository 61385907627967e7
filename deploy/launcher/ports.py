"""Finds free ports for the services of `triptych up`."""

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from deploy.launcher.deaths import BAD_SETTING
from deploy.launcher.service_flags import LOOPBACK
from deploy.launcher.settings import LaunchSettings
from deploy.launcher.supervisor import LaunchError


@dataclass(frozen=True)
class Ports:
    """The ports of a stack."""

    http: int
    """All gateways'; unused with a Unix socket."""
    scheduler: int
    workers: tuple[int, ...]
    """Each rank's, replica by replica."""
    masters: tuple[int, ...]
    """Where the ranks of each replica meet."""
    metrics: tuple[int | None, ...]
    """Each gateway's own; None for a single gateway with a port that was given none."""


@contextlib.contextmanager
def free_ports(settings: LaunchSettings) -> Iterator[Ports]:
    """Yields free ports for the services, and holds them until the block ends.

    Raises:
        LaunchError: A requested address is in use or does not belong to this machine.
    """
    with contextlib.ExitStack() as stack:

        def hold(host: str, port: int, flag: str) -> int:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                server = stack.enter_context(socket.create_server((host, port), family=family))
            except OSError as error:
                reason = error.strerror or error
                raise LaunchError(
                    f"cannot listen on {host} port {port}: {reason}; choose another with {flag}", BAD_SETTING
                ) from error
            return int(server.getsockname()[1])

        def metrics_port(index: int) -> int | None:
            first = settings.metrics_port
            if first is None and settings.gateways == 1 and settings.uds is None:
                return None
            return hold(settings.http_host, first + index if first else 0, "--metrics-port")

        yield Ports(
            hold(LOOPBACK, 0, "") if settings.uds else hold(settings.host, settings.port, "--port or --host"),
            hold(LOOPBACK, settings.scheduler_port, "--scheduler-port"),
            tuple(hold(LOOPBACK, 0, "") for _ in range(settings.workers * settings.layout.world_size)),
            tuple(hold(LOOPBACK, 0, "") for _ in range(settings.workers)),
            tuple(metrics_port(index) for index in range(settings.gateways)),
        )
