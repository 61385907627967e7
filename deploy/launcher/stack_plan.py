"""The child processes of `triptych up`: their commands, ports and sockets."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from deploy.launcher import service_flags
from deploy.launcher.ports import Ports, free_ports
from deploy.launcher.process import ChildSpec, worker_spec
from deploy.launcher.settings import LaunchSettings
from gateway.settings import Settings as GatewaySettings
from scheduler_svc.settings import Settings as SchedulerSettings
from worker_svc.settings import Settings as WorkerSettings

COMMAND = (sys.executable, "-m", "deploy.cli")


@dataclass(frozen=True)
class StackPlan:
    """The children of one stack; nothing runs yet."""

    ports: Ports
    scheduler_socket: Path
    gateways: tuple[ChildSpec, ...]
    scheduler: ChildSpec
    workers: tuple[ChildSpec, ...]
    """Replica by replica, and rank by rank within each."""

    @classmethod
    def make(cls, settings: LaunchSettings, sockets: Path) -> Self:
        """Chooses ports and builds the commands.

        Args:
            settings: the launcher's.
            sockets: the absolute folder of the services' Unix sockets.

        Raises:
            LaunchError: A requested address is not free.
            ConfigurationRefused: Too few NPUs are visible.
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
    secrets = service_flags.secrets_of(settings, GatewaySettings)
    count = settings.gateways
    names = ["gateway"] if count == 1 else [f"gateway-{index}" for index in range(count)]
    return tuple(
        ChildSpec(
            name,
            (*COMMAND, "gateway", *service_flags.gateway_flags(settings, ports.http, metrics, socket)),
            settings.run_dir,
            secrets,
        )
        for name, metrics in zip(names, ports.metrics, strict=True)
    )


def _scheduler(settings: LaunchSettings, ports: Ports, socket: Path) -> ChildSpec:
    flags = service_flags.scheduler_flags(settings, ports.scheduler, socket)
    secrets = service_flags.secrets_of(settings, SchedulerSettings)
    return ChildSpec("scheduler", (*COMMAND, "scheduler", *flags), settings.run_dir, secrets)


def _workers(settings: LaunchSettings, ports: Ports, sockets: Path, socket: Path) -> tuple[ChildSpec, ...]:
    secrets, ranks = service_flags.secrets_of(settings, WorkerSettings), settings.layout.world_size
    specs = []
    for index, port in enumerate(ports.workers):
        replica, rank = divmod(index, ranks)
        name = f"worker-{replica}" if ranks == 1 else f"worker-{replica}-rank-{rank}"
        own, master = sockets / f"{name}.sock", ports.masters[replica]
        flags = service_flags.worker_flags(settings, port, own, socket, index=index, master=master)
        variables = {**service_flags.worker_environment(settings, index), **secrets}
        specs.append(worker_spec(name, tuple(flags), settings.run_dir, variables))
    return tuple(specs)
