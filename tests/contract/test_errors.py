"""The errors of calls, and the bound on calls at once, from a real server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any
from urllib.parse import quote

import grpc.aio
import pytest
from google.protobuf import any_pb2
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.errors import (
    ConfigurationRefused,
    Context,
    Internal,
    InvalidArgument,
    NotFound,
    Overloaded,
    TriptychError,
    Unauthenticated,
    Unavailable,
    abort,
    from_rpc_error,
)
from protos.service.grpc_options import open_channel
from protos.service.server import Server

pytestmark = [pytest.mark.contract, pytest.mark.timeout(20)]

_DETAILS = "grpc-status-details-bin"
_MAX_BYTES = 2048


@contextlib.asynccontextmanager
async def _calling(fail: Callable[[Context], Awaitable[None]]) -> AsyncIterator[grpc.aio.AioRpcError]:
    """Calls a server whose only method fails so; yields the failure."""

    async def method(_: bytes, context: Context) -> bytes:
        await fail(context)
        return b""

    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(method)
    server = Server(
        ("s",), lambda grpc_server: grpc_server.add_registered_method_handlers("s", {"Fail": handler})
    )
    port = await server.start("127.0.0.1", 0)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/s/Fail")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"")
        yield caught.value
    await server.stop(0)


def aborting(error: TriptychError, **options: bool) -> AbstractAsyncContextManager[grpc.aio.AioRpcError]:
    """Calls a server that aborts the call with an error."""
    return _calling(lambda context: abort(context, error, **options))


@pytest.mark.parametrize("text", ["name, " * 2000, "é" * 9000, "重み" * 9000, "%" * 9000, "\n" * 9000])
async def test_long_reasons_keep_their_type(text: str) -> None:
    """A reason above 8 KiB arrives shortened, in a status of at most 2 KiB."""
    async with aborting(ConfigurationRefused(text, param="p" * 9000)) as error:
        typed = from_rpc_error(error)
        assert isinstance(typed, ConfigurationRefused)
        assert len(typed.message) > 80
        assert typed.message == text[: len(typed.message) - 1] + "…"
        details = dict(error.trailing_metadata() or ())[_DETAILS]
        sent = len(quote(error.details() or "", safe=" ")) + len(details) * 4 / 3
        assert _MAX_BYTES / 2 < sent <= _MAX_BYTES


@pytest.mark.parametrize("text", ["model.layers.29.self_attn.q_proj.weight, " * 250, "重み" * 1500])
async def test_services_tell_one_another_long_reasons(text: str) -> None:
    """A list of a model's tensors arrives whole."""
    async with aborting(ConfigurationRefused(text), to_service=True) as error:
        typed = from_rpc_error(error)
        assert isinstance(typed, ConfigurationRefused)
        assert typed.message == text


async def test_short_reasons_arrive_whole() -> None:
    """Texts of usual length are not shortened."""
    async with aborting(Overloaded("full; " * 70, param="n", retry_after_ms=3)) as error:
        typed = from_rpc_error(error)
        assert (typed.message, typed.param, typed.retry_after_ms) == ("full; " * 70, "n", 3)


_GARBAGE = [
    b"\xff\xff\xff",
    status_pb2.Status(code=5, message="why", details=[any_pb2.Any()]).SerializeToString()[:-1],
    status_pb2.Status(code=13, message="why").SerializeToString(),
    status_pb2.Status(code=5, message="another").SerializeToString(),
    status_pb2.Status(
        code=5, message="why", details=[any_pb2.Any(type_url="t/triptych.v1.Error", value=b"\xff")]
    ).SerializeToString(),
]


@pytest.mark.parametrize("details", _GARBAGE)
async def test_unreadable_details_leave_the_plain_code(details: bytes) -> None:
    """A detail that is garbage, truncated or of another status is ignored."""

    async def fail(context: Context) -> None:
        context.set_trailing_metadata(((_DETAILS, details),))
        await context.abort(grpc.StatusCode.NOT_FOUND, "why")

    async with _calling(fail) as error:
        typed = from_rpc_error(error)
        assert type(typed) is NotFound
        assert typed.message == "why"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
        (grpc.StatusCode.UNAUTHENTICATED, Unauthenticated),
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidArgument),
        (grpc.StatusCode.UNKNOWN, Internal),
    ],
)
async def test_plain_codes(code: grpc.StatusCode, expected: type[TriptychError]) -> None:
    """A status without a detail is taken as its code."""

    async def fail(context: Context) -> None:
        context.set_trailing_metadata((("other", "metadata"),))
        await context.abort(code, "why")

    async with _calling(fail) as error:
        assert type(from_rpc_error(error)) is expected


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
