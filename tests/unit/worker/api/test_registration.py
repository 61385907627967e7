"""A worker stays registered, whatever happens to the scheduler."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from protos.errors import Unavailable, abort
from protos.triptych.v1 import registry_pb2, registry_pb2_grpc
from worker_svc.api import registration
from worker_svc.api.registration import stay_registered


class FakeRegistry(registry_pb2_grpc.WorkerRegistryServicer):
    """Records registrations, of which the first ones fail."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[registry_pb2.RegisterRequest] = asyncio.Queue()
        self.failures = 3
        """Registrations that are accepted and then fail."""

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
        await asyncio.Event().wait()


@pytest.mark.timeout(30)
async def test_a_registration_that_fails_later_does_not_reset_the_delay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registration, "_FIRST_DELAY_S", 0.05)
    registry = FakeRegistry()
    server = grpc.aio.server()
    registry_pb2_grpc.add_WorkerRegistryServicer_to_server(registry, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    task = asyncio.create_task(stay_registered(address, worker_id="w1", host="", port=7))
    await registry.requests.get()
    started = time.monotonic()
    for _ in range(3):
        await registry.requests.get()
    assert time.monotonic() - started > 0.8 * (0.05 + 0.1 + 0.2)
    task.cancel()
    await server.stop(0)
