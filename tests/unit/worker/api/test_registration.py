"""A worker stays registered, whatever happens to the scheduler."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from protos.errors import Unavailable, abort
from protos.service.grpc_options import SCHEMA_REVISION
from protos.triptych.v1 import registry_pb2, registry_pb2_grpc
from worker_svc.api import registration
from worker_svc.api.registration import stay_registered


class FakeRegistry(registry_pb2_grpc.WorkerRegistryServicer):
    """Records registrations; lets them fail on demand."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[registry_pb2.RegisterRequest] = asyncio.Queue()
        self.failures = 0
        """Registrations that are accepted and then fail."""
        self.end = asyncio.Event()

    async def Leave(
        self, request: registry_pb2.LeaveRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> registry_pb2.LeaveResponse:
        return registry_pb2.LeaveResponse()

    async def Register(
        self, request: registry_pb2.RegisterRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[registry_pb2.RegisterEvent]:
        self.requests.put_nowait(request)
        yield registry_pb2.RegisterEvent(state=registry_pb2.RegisterEvent.STATE_ACCEPTED)
        if self.failures:
            self.failures -= 1
            await abort(context, Unavailable("the worker cannot be configured"))
        await self.end.wait()


async def serve(registry: FakeRegistry, port: int = 0) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server()
    registry_pb2_grpc.add_WorkerRegistryServicer_to_server(registry, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, bound


@contextlib.asynccontextmanager
async def registered(port: int) -> AsyncIterator[None]:
    """Keeps a worker called w1 on port 7 registered within the block."""
    task = asyncio.create_task(stay_registered(f"127.0.0.1:{port}", worker_id="w1", host="", port=7))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.mark.timeout(30)
async def test_a_registration_that_fails_later_does_not_reset_the_delay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The delays double from one failed registration to the next, although each of them was accepted."""
    monkeypatch.setattr(registration, "_FIRST_DELAY_S", 0.05)
    registry = FakeRegistry()
    registry.failures = 3
    server, port = await serve(registry)
    async with registered(port):
        await registry.requests.get()
        started = time.monotonic()
        for _ in range(3):
            await registry.requests.get()
        took_s = time.monotonic() - started
    assert took_s > 0.8 * (0.05 + 0.1 + 0.2)
    await server.stop(0)


@pytest.mark.timeout(60)
async def test_a_restarted_scheduler_finds_its_workers() -> None:
    """A worker waits for a scheduler that starts later, and registers with a restarted one."""
    registry = FakeRegistry()
    server, port = await serve(registry)
    await server.stop(0)
    async with registered(port):
        server, _ = await serve(registry, port)
        request = await registry.requests.get()
        expected = registry_pb2.RegisterRequest(schema_revision=SCHEMA_REVISION, worker_id="w1", port=7)
        assert request == expected  # without a host: the scheduler takes the caller's address
        await server.stop(0)
        server, _ = await serve(registry, port)
        await registry.requests.get()
    await server.stop(0)
