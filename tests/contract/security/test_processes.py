"""Real services with TLS, client certificates and a token serve together, and log no secret."""

import asyncio
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.scheduler_client.client import InferenceClient
from protos.service.channels import LinkSecurity
from protos.service.server import Server
from protos.service.tls import Certificates
from protos.service.tokens import ServiceTokens
from protos.triptych.v1 import worker_pb2_grpc
from tests.support import tiny_models
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.security.certificates import OTHER_TOKEN, TOKEN, service_files
from tests.support.service import Service, running_service
from worker_svc.api.registration import leave, stay_registered

pytestmark = pytest.mark.contract

NAME = "triptych.internal"


def process(module: str, event: str, *flags: str) -> AbstractContextManager[Service]:
    """Runs a service and waits for an event in its log."""
    return running_service("-m", module, "--port", "0", "--log-level", "debug", *flags, event=event)


def security(folder: Path, token: str) -> LinkSecurity:
    certificates = Certificates(service_files(folder, hosts=(NAME,)))
    return LinkSecurity(certificates, ServiceTokens(token=token), True, NAME)


async def line_with(logs: list[Any], event: str, **fields: str) -> dict[str, Any]:
    """Waits for a line of a log, and returns it."""
    async with asyncio.timeout(20):
        while True:
            for line in logs:
                if line["event"] == event and fields.items() <= line.items():
                    return dict(line)
            await asyncio.sleep(0.01)


async def register_for_a_moment(
    address: str, port: int, ours: LinkSecurity, event: str, **fields: str
) -> dict[str, Any]:
    """Keeps a worker registered until it logs an event, and returns that line."""
    with capture_logs() as logs:
        task = asyncio.ensure_future(
            stay_registered(address, worker_id="w", host="", port=port, security=ours)
        )
        line = await line_with(logs, event, **fields)
        task.cancel()
    return line


async def test_services_with_the_same_secrets_serve_and_others_are_refused(tmp_path: Path) -> None:
    """The scheduler accepts the worker that it dials by its name; no log has a secret."""
    paths = service_files(tmp_path / "files", hosts=(NAME,))
    token_file = tmp_path / "token"
    token_file.write_text(f"{TOKEN}\n")
    flags = [
        f"--grpc-tls-ca={paths.ca}", f"--grpc-tls-cert={paths.cert}", f"--grpc-tls-key={paths.key}",
        f"--grpc-tls-name={NAME}", f"--service-token-file={token_file}",
    ]  # fmt: skip
    ours, theirs = security(tmp_path / "worker", TOKEN), security(tmp_path / "other", OTHER_TOKEN)
    fake = FakeWorker()
    worker = Server(
        ("triptych.v1.Worker",),
        lambda server: worker_pb2_grpc.add_WorkerServicer_to_server(fake, server),
        security=ours,
    )
    worker_port = await worker.start("127.0.0.1", 0)
    with process("scheduler_svc", "listening", *flags, "--grpc-tls-require-client-cert") as scheduler:
        address = f"127.0.0.1:{scheduler.line['port']}"
        with process("gateway", "connected", *flags, f"--scheduler-address={address}") as gateway:
            await register_for_a_moment(address, worker_port, ours, "registered", state="serving")
            await leave(address, worker_id="w", security=ours)
            refused = await register_for_a_moment(address, worker_port, theirs, "not_registered")
            assert "another service token; set --service-token-file" in refused["reason"]
            with capture_logs() as logs:
                client = InferenceClient(address, security=theirs)
                await client.start()
                refusal = await line_with(logs, "refused")
                await client.close()
            assert "another service token" in refusal["reason"]
            friend = InferenceClient(address, security=ours)
            await friend.start()
            days_left = (await friend.get_metrics()).decode().partition("scheduler_certificate_days_left{")[2]
            await friend.close()
            assert days_left.startswith('setting="--grpc-tls-ca"} 39')
            written = gateway.end() + scheduler.end()
    fake.gate.set()
    await worker.stop(0)
    assert "call_refused" in written
    for secret in (TOKEN, OTHER_TOKEN, "PRIVATE KEY"):
        assert secret not in written + str(logs)


@pytest.mark.parametrize(
    "module",
    ["gateway", *(pytest.param(name, marks=pytest.mark.slow) for name in ("scheduler_svc", "worker_svc"))],
)
def test_every_service_announces_the_end_of_a_certificate(tmp_path: Path, module: str) -> None:
    """It does so without any connection, and has read the files that are there by then."""
    paths = service_files(tmp_path / "files", days=90)
    flags = [f"--grpc-tls-ca={paths.ca}", f"--grpc-tls-cert={paths.cert}", f"--grpc-tls-key={paths.key}"]
    if module == "worker_svc":
        flags.append(f"--model={tiny_models.write('llama', tmp_path / 'model')}")
    often = "import runpy; from protos.service import tls; tls._LOOK_EVERY_S = 0.1"
    run = f"{often}; runpy.run_module('{module}', run_name='__main__')"
    with running_service("-c", run, "--port=0", *flags) as service:
        service_files(tmp_path / "files", days=20.5)
        service.read_until("certificate_ends")
        assert service.line["reason"] == f"--grpc-tls-cert: the certificate in {paths.cert} ends in 20 days"
