"""Whether the other services answer, against a real gRPC server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deploy.diagnosis.findings import Missing, Remark
from deploy.inspection import services
from protos.security.links import LinkSecurity
from protos.security.tokens import ServiceTokens
from protos.server import Server
from protos.wire import unix_address
from tests.support.security.certificates import OTHER_TOKEN, TOKEN

WAITS = "it waits"
OPEN = LinkSecurity()


async def asked(path: Path, service: str, security: LinkSecurity = OPEN) -> str:
    """Asks for a service's health, and returns the finding."""
    try:
        return await asyncio.to_thread(services.scheduler, unix_address(path), security, service, waits=WAITS)
    except Remark as remark:
        return str(remark)


@contextlib.asynccontextmanager
async def serving(path: Path, *names: str, security: LinkSecurity = OPEN) -> AsyncIterator[Server]:
    """Runs a server with services that do not serve yet."""
    server = Server(names, lambda _: None, security=security)
    await server.start("127.0.0.1", 0, path)
    try:
        yield server
    finally:
        await server.stop(0)


async def test_a_scheduler_that_is_not_there_is_named(tmp_path: Path) -> None:
    """With the reason, and what happens until it is there."""
    path = tmp_path / "missing.sock"
    text = await asked(path, services.INFERENCE)
    assert text.startswith(f"no scheduler answers at {unix_address(path)} (")
    assert text.endswith(f"); {WAITS}")


async def test_a_scheduler_is_asked_for_each_service(tmp_path: Path) -> None:
    """It may take registrations long before a worker is ready."""
    path = tmp_path / "s.sock"
    address = unix_address(path)
    async with serving(path, services.INFERENCE, services.REGISTRY) as server:
        await server.set_serving(True, services.REGISTRY)
        assert await asked(path, services.REGISTRY) == f"{address} answers, and takes registrations"
        assert await asked(path, services.INFERENCE) == f"{address} answers, but has no ready worker; {WAITS}"
        await server.set_serving(True, services.INFERENCE)
        assert await asked(path, services.INFERENCE) == f"{address} answers, and has a ready worker"


@pytest.mark.parametrize("service", [services.INFERENCE, services.REGISTRY])
async def test_names_of_services_are_the_scheduler_s(service: str) -> None:
    """They are those under which a scheduler reports its health."""
    from scheduler_svc import __main__ as scheduler

    assert service in {scheduler.INFERENCE, scheduler.REGISTRY}


async def test_a_wrong_token_is_a_failure(tmp_path: Path) -> None:
    """Health needs no token, so another call shows what a scheduler makes of it."""
    path = tmp_path / "s.sock"
    ours, theirs = (LinkSecurity(tokens=ServiceTokens(token=token)) for token in (TOKEN, OTHER_TOKEN))
    async with serving(path, services.INFERENCE, security=theirs) as server:
        await server.set_serving(True, services.INFERENCE)
        for wrong, fault in ((ours, "has another service token"), (OPEN, "has no service token")):
            with pytest.raises(Missing, match=f"the scheduler refuses this service: .*{fault}"):
                await asked(path, services.INFERENCE, wrong)
        assert (await asked(path, services.INFERENCE, theirs)).endswith("has a ready worker")
