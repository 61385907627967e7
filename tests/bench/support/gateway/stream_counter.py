"""A client that keeps many chat streams open and counts their tokens, at a small cost per chunk."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Final, cast

_TIMEOUT_S: Final = 60.0
_EVENT: Final = b"data: {"


@dataclass
class Counts:
    """What arrived on all streams together since the last reset."""

    tokens: int = 0
    chunks: int = 0
    gaps_s: list[float] = field(default_factory=list)
    """Times between two reads of a stream."""


@dataclass(frozen=True)
class Request:
    """What every stream asks for."""

    model: str
    max_tokens: int
    tokens_per_s: int
    """The pace of the engine, 0 for as fast as it can; travels as the seed."""

    def message(self, host: str, number: int) -> bytes:
        """Returns the HTTP request of one stream."""
        body = json.dumps(
            {
                "model": self.model, "stream": True, "max_tokens": self.max_tokens, "seed": self.tokens_per_s,
                "ignore_eos": True, "messages": [{"role": "user", "content": f"Tell me about France, {number}."}],
            }
        ).encode()  # fmt: skip
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class _Stream(asyncio.Protocol):
    """One stream; the text of each token begins with a space and has no other."""

    def __init__(self, owner: "Streams") -> None:
        self._owner = owner
        self._last_s = 0.0
        self.transport: asyncio.Transport | None = None
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have another base class.
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        counts, now = self._owner.counts, time.monotonic()
        if self._last_s:
            counts.gaps_s.append(now - self._last_s)
            events = data.count(_EVENT)
            counts.chunks += events
            counts.tokens += data.count(b" ") - events
            if b"data: [DONE]" in data:
                counts.tokens -= 1
                self._end(None)
        else:
            if not data.startswith(b"HTTP/1.1 200"):
                self._end(RuntimeError(data.decode(errors="replace")))
            self._owner.on_begin()
        self._last_s = now

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or RuntimeError("the server closed a stream"))

    def _end(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self._owner.on_failure(error)
            self.ended.cancel()


class Streams:
    """Open streams and what arrived on them."""

    counts: Counts

    def __init__(self, host: str, port: int) -> None:
        """Opens none yet; the server listens on `host` and `port`."""
        self.counts = Counts()
        self._host, self._port = host, port
        self._streams: list[_Stream] = []
        self._waiting = 0
        self._all_begun = asyncio.Event()
        self._failure: Exception | None = None

    async def open(self, count: int, request: Request, pause_s: float = 0.0) -> None:
        """Opens streams, and returns once each of them has begun.

        Raises:
            RuntimeError: a request is refused, or a stream breaks.
        """
        loop = asyncio.get_running_loop()
        self._waiting = count
        for number in range(count):
            transport, stream = await loop.create_connection(lambda: _Stream(self), self._host, self._port)
            self._streams.append(stream)
            transport.write(request.message(self._host, number))
            await asyncio.sleep(pause_s)
        async with asyncio.timeout(_TIMEOUT_S):
            await self._all_begun.wait()
        self.check()

    async def ended(self) -> None:
        """Waits until all answers are complete."""
        async with asyncio.timeout(_TIMEOUT_S):
            await asyncio.gather(*(stream.ended for stream in self._streams), return_exceptions=True)
        self.check()

    def check(self) -> None:
        """Raises the first failure of a stream."""
        if self._failure is not None:
            raise self._failure

    def take(self) -> Counts:
        """Returns what arrived since the last call."""
        counts, self.counts = self.counts, Counts()
        return counts

    def close(self) -> None:
        """Leaves all streams."""
        for stream in self._streams:
            if not stream.ended.done():
                stream.ended.cancel()
            if stream.transport is not None:
                stream.transport.abort()

    def on_begin(self) -> None:
        """Counts a stream that has begun."""
        self._waiting -= 1
        if not self._waiting:
            self._all_begun.set()

    def on_failure(self, error: Exception) -> None:
        """Records the failure of a stream."""
        self._failure = self._failure or error
        self._all_begun.set()
