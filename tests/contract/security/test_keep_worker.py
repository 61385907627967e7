"""`triptych keep-worker` sees that its worker serves, whatever names the worker's certificate has."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from deploy.commands import keep_worker
from deploy.launcher.service_flags import flags_of
from deploy.launcher.settings import KeepWorkerSettings
from protos.service.server import Server
from protos.service.settings import load
from tests.support.security.certificates import service_files
from worker_svc.settings import Settings as WorkerSettings

pytestmark = pytest.mark.contract

PORT = 50061


def settings_of(folder: Path, **changes: str) -> KeepWorkerSettings:
    """Returns settings whose certificate is for another host than 127.0.0.1."""
    paths = service_files(folder / "tls", hosts=("elsewhere.example",))
    given = {"grpc_tls_ca": paths.ca, "grpc_tls_cert": paths.cert, "grpc_tls_key": paths.key} | changes
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    return load(KeepWorkerSettings, [*flags, "--model=smollm2", f"--port={PORT}"])


class Keeper:
    """A supervisor that ends as soon as its worker serves."""

    def __init__(self) -> None:
        self.served = asyncio.Event()

    def mark_served(self) -> None:
        self.served.set()

    async def run(self) -> None:
        await self.served.wait()


async def test_a_certificate_need_not_be_for_the_loopback(tmp_path: Path) -> None:
    """The worker's health is asked for on a Unix socket, which has no TLS."""
    settings = settings_of(tmp_path)
    path = keep_worker._socket(settings, tmp_path)
    assert path is not None
    assert f"--socket={path}" in flags_of(WorkerSettings, settings, socket=path)
    server = Server((), lambda _: None, security=settings.link_security())
    await server.start("127.0.0.1", 0, path)
    await server.set_serving(True)
    keeper: Any = Keeper()
    try:
        async with asyncio.timeout(10):
            await keep_worker._keep(keeper, settings, path)
    finally:
        await server.stop(0)


def test_other_workers_get_no_socket(tmp_path: Path) -> None:
    """Without TLS, with a socket of the user's, or where a scheduler would call the worker there."""
    for settings, expected in (
        (load(KeepWorkerSettings, ["--model=smollm2"]), None),
        (settings_of(tmp_path, socket="/run/own.sock"), Path("/run/own.sock")),
        (settings_of(tmp_path, scheduler_address="unix:/run/scheduler.sock"), None),
    ):
        assert keep_worker._socket(settings, tmp_path) == expected
