"""`triptych keep-worker`: runs a worker, and restarts it from a standby when it dies.

It is the first process of the worker's image. The worker's output goes where this process' goes.
"""

import asyncio
import contextlib
import os
import sys
import tempfile
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.launcher.process import worker_spec
from deploy.launcher.service_flags import flags_of, secrets_of
from deploy.launcher.settings import KeepWorkerSettings
from deploy.launcher.supervisor import (
    BAD_SETTING,
    LaunchError,
    Standbys,
    Supervisor,
    run_until_signal,
    standby_spec,
)
from protos.errors import ConfigurationRefused
from protos.service.channels import LinkSecurity
from protos.service.grpc_options import MAX_SOCKET_PATH_BYTES, is_unix, unix_address
from protos.service.settings import CONFIG_VARIABLE, load
from worker_svc.settings import Settings as WorkerSettings

# The container runtime has its own deadline, which suits the worker.
_DRAIN_S = 86_400.0
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared, not bound


def main(argv: list[str] | None = None) -> int:
    """Runs until SIGTERM or SIGINT.

    Returns:
        0 after a clean stop, 2 for a bad setting, 130 after a SIGINT that follows another signal, 1 if the
        worker never serves.
    """
    try:
        settings = load(KeepWorkerSettings, argv)
        os.environ.pop(CONFIG_VARIABLE, None)  # the worker gets all settings as flags
        with tempfile.TemporaryDirectory(prefix="triptych-worker-") as folder:
            return asyncio.run(_run(settings, Path(folder)))
    except ConfigurationRefused as error:
        _say(f"triptych keep-worker: {error.message}")
        return BAD_SETTING


async def _run(settings: KeepWorkerSettings, folder: Path) -> int:
    own_socket = _socket(settings, folder)
    flags = flags_of(WorkerSettings, settings, socket=own_socket)
    secrets = secrets_of(settings, WorkerSettings)
    worker = worker_spec("worker", tuple(flags), folder, secrets, has_log=False)
    standbys = Standbys(standby_spec(worker), settings.standby_workers, _say)
    supervisor = Supervisor([[worker]], _say, standbys=standbys, drain_s=_DRAIN_S)

    def complain(error: LaunchError) -> None:
        if error.exit_code != BAD_SETTING:  # otherwise the worker has said why
            _say(f"triptych keep-worker: {error}")

    serving = _keep(supervisor, settings, own_socket)
    return await run_until_signal(supervisor, serving, complain=complain)


def _socket(settings: KeepWorkerSettings, folder: Path) -> Path | None:
    """Returns the Unix socket where the worker listens, too.

    With TLS it gets one in ``folder``, for its health: its certificate is seldom for 127.0.0.1. A scheduler
    on a Unix socket would call the worker there, and may not see the folder.
    """
    added = folder / "worker.sock"
    if settings.socket is not None or settings.grpc_tls_ca is None or is_unix(settings.scheduler_address):
        return settings.socket
    return added if len(os.fsencode(added)) <= MAX_SOCKET_PATH_BYTES else None


async def _keep(supervisor: Supervisor, settings: KeepWorkerSettings, own_socket: Path | None) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        address = f"{_ANY.get(settings.host, settings.host)}:{settings.port}"
        if own_socket is not None:
            address = unix_address(own_socket)
        group.create_task(_mark_served(supervisor, address, settings.link_security()))


async def _mark_served(supervisor: Supervisor, address: str, security: LinkSecurity) -> None:
    """Tells the supervisor as soon as the worker's health is SERVING."""
    async with security.open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            # A worker that dies before it serves ends the call. The next one waits for its successor.
            with contextlib.suppress(grpc.aio.AioRpcError):
                answers = stub.Watch(  # type: ignore[attr-defined]
                    health_pb2.HealthCheckRequest(), wait_for_ready=True
                )
                async for answer in answers:
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        supervisor.mark_served()
                        return


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
