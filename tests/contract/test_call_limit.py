"""The bound on calls at once, on a real server."""

import asyncio
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.errors import Overloaded, from_rpc_error
from protos.service.grpc_options import open_channel
from protos.service.server import Server

pytestmark = pytest.mark.contract


async def test_calls_above_the_limit_are_refused_until_one_ends() -> None:
    """The error names the setting; a health check is answered all the same."""
    server = Server(("s",), lambda _: None, max_concurrent_rpcs=2)
    port = await server.start("127.0.0.1", 0)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        watches = [health.Watch(request) for _ in range(2)]
        for watch in watches:
            await watch.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Watch(request).read()
        error = from_rpc_error(caught.value)
        assert isinstance(error, Overloaded)
        assert "raise --max-concurrent-rpcs" in error.message
        await health.Check(request)
        watches[0].cancel()
        async with asyncio.timeout(10):
            while not await _answers(health.Watch(request)):
                pass
    await server.stop(0)


async def _answers(watch: "grpc.aio.UnaryStreamCall[object, object]") -> bool:
    try:
        await watch.read()
    except grpc.aio.AioRpcError:
        return False
    return True
