"""Ways to attack: over HTTP, byte by byte, and over gRPC."""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import grpc.aio

from protos.service.channels import LinkSecurity
from protos.service.grpc_options import SCHEMA_REVISION
from protos.service.tokens import ServiceTokens
from protos.triptych.v1 import common_pb2, inference_pb2, inference_pb2_grpc

_PIECE: Final = 1 << 16

Then: TypeAlias = Literal["read", "hold", "leave"]
"""What a client does with an answer: reads it, keeps the connection without reading, or leaves at once."""


@dataclass(frozen=True)
class Target:
    """A stack with keys."""

    host: str
    port: int
    """The gateway's."""
    scheduler: str
    """The scheduler's address."""
    token: str
    """The service token."""
    key: str
    """The attacker's API key."""
    hold_s: float
    """How long a client that holds its connections holds them."""


def _plain_head(path: str, length: int) -> bytes:
    return b"POST %b HTTP/1.1\r\ncontent-length: %d\r\n" % (path.encode(), length)


@dataclass(frozen=True)
class Http:
    """Requests at once, each on a connection of its own."""

    path: str = "/v1/completions"
    body: Callable[[], bytes] = bytes
    copies: int = 1
    then: Then = "read"
    sent: float = 1.0
    """The part of the body that is sent; the rest never follows."""
    head: Callable[[str, int], bytes] = _plain_head
    """Makes request line and headers from path and length, without the key and the blank line."""
    more: bytes = b""
    """Further headers."""
    pause_s: float = 0
    """Between pieces of the body."""
    piece: int = _PIECE
    """Bytes of a piece."""

    async def send(self, target: Target) -> Counter[str]:
        """Sends all; returns the number of answers by status."""
        body = await asyncio.to_thread(self.body)
        head = self.head(self.path, len(body)) if self.path else b""
        if head and self.sent:
            head += b"authorization: Bearer %b\r\nhost: x\r\nconnection: close\r\n" % target.key.encode()
            head += b"content-type: application/json\r\n" + self.more + b"\r\n"
        part = memoryview(body)[: int(len(body) * self.sent)]
        return Counter(
            await asyncio.gather(*(self._exchange(target, head, part) for _ in range(self.copies)))
        )

    async def _exchange(self, target: Target, head: bytes, body: memoryview) -> str:
        try:
            reader, writer = await asyncio.open_connection(target.host, target.port, limit=_PIECE)
        except OSError as error:
            return type(error).__name__
        sending = asyncio.create_task(self._write(writer, head, body))
        try:
            if self.sent < 1 or not head:
                async with asyncio.timeout(target.hold_s):
                    return _status(await reader.readline())
            status = _status(await reader.readline())
            if self.then == "hold":
                await asyncio.sleep(target.hold_s)
            while self.then == "read" and await reader.read(_PIECE):
                pass
            return status
        except TimeoutError:
            return "open"
        except OSError as error:
            return type(error).__name__
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            writer.transport.abort()

    async def _write(self, writer: asyncio.StreamWriter, head: bytes, body: memoryview) -> None:
        with contextlib.suppress(OSError):
            writer.write(head)
            for start in range(0, len(body), self.piece):
                writer.write(body[start : start + self.piece])
                await writer.drain()
                if self.pause_s:
                    await asyncio.sleep(self.pause_s)


def _status(line: bytes) -> str:
    parts = line.split()
    return parts[1].decode() if len(parts) > 1 else "closed"


_ids = itertools.count()


def generate(
    prompt: Sequence[int] = (504, 3575), max_tokens: int = 8, **fields: Any
) -> inference_pb2.GenerateRequest:
    """Returns a request of the attacker's tenant."""
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, **fields)
    return inference_pb2.GenerateRequest(
        request_id=f"hostile-{next(_ids)}", prompt_token_ids=prompt, sampling=sampling, tenant="bob"
    )


@dataclass(frozen=True)
class Grpc:
    """Calls at once, over few channels."""

    call: Callable[[inference_pb2_grpc.InferenceStub], Any]
    """Begins a call whose answer is a stream."""
    copies: int = 1
    then: Then = "read"
    channels: int = 4

    async def send(self, target: Target) -> Counter[str]:
        """Makes all calls; returns the number by status."""
        async with contextlib.AsyncExitStack() as stack:
            security = LinkSecurity(tokens=ServiceTokens(token=target.token))
            stubs = [
                inference_pb2_grpc.InferenceStub(
                    await stack.enter_async_context(security.open_channel(target.scheduler))
                )
                for _ in range(self.channels)
            ]
            calls = (self._run(stubs[number % len(stubs)], target) for number in range(self.copies))
            return Counter(await asyncio.gather(*calls))

    async def _run(self, stub: inference_pb2_grpc.InferenceStub, target: Target) -> str:
        call = self.call(stub)
        try:
            async for _ in call:
                if self.then == "leave":
                    return "left"
                if self.then == "hold":
                    await asyncio.sleep(target.hold_s)
                    return "open"
        except grpc.aio.AioRpcError as error:
            return error.code().name
        finally:
            call.cancel()
        return "OK"


def connect(count: int, make: Callable[[], inference_pb2.GenerateRequest]) -> Callable[[Any], Any]:
    """Returns a call that sends `count` requests over one Connect stream."""

    async def messages() -> AsyncIterator[inference_pb2.ConnectRequest]:
        for _ in range(count):
            yield inference_pb2.ConnectRequest(schema_revision=SCHEMA_REVISION, generate=make())

    return lambda stub: stub.Connect(messages())


Sender: TypeAlias = Http | Grpc
