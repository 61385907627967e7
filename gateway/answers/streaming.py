"""Responses that take time: streamed as they grow, or collected. Both stop when the client disconnects.

Streams are server-sent events. Each protocol has a writer of its own for them.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.answers.generation import Generation, Usage
from gateway.answers.idle_watch import IdleWatch
from gateway.answers.logprobs import TokenReport
from gateway.answers.sequence_text import Delta
from gateway.http.errors import ClientGone, note_error
from gateway.http.event_streams import (
    KEEP_ALIVE,
    STREAM_HEADERS,
    as_stream_error,
    encoded,
)
from gateway.http.middleware import note
from gateway.http.protocol import BodyWriter
from protos.errors import TriptychError


class StreamWriter(ABC):
    """Writes one streamed answer as server-sent events, in the form of one protocol."""

    def begin(self) -> bytes:
        """Returns the events before the first delta."""
        return b""

    @abstractmethod
    def write(self, delta: Delta) -> bytes:
        """Returns the events for a delta; nothing if it settles none."""

    @abstractmethod
    def end(self, usage: Usage) -> bytes:
        """Returns the events that end the stream, after the last delta of every sequence."""

    @abstractmethod
    def error(self, error: TriptychError) -> bytes:
        """Returns the events that end a stream that failed, at any point."""

    def keep_alive(self) -> bytes:
        """Returns bytes without meaning that keep an idle connection open; after :meth:`begin`."""
        return KEEP_ALIVE


T = TypeVar("T")


@contextlib.asynccontextmanager
async def ends_with_client(receive: Receive, generation: Generation) -> AsyncIterator[None]:
    """Fails ``generation`` with :class:`ClientGone` if the client disconnects meanwhile."""

    async def watch() -> None:
        # The body has been read, so the next message is the disconnect.
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.fail(ClientGone("the client closed the connection"))

    watcher = asyncio.create_task(watch(), name="watch-client")
    try:
        yield
    finally:
        watcher.cancel()


async def while_client_waits(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of ``work``; cancels it if the client disconnects meanwhile.

    Raises:
        ClientGone: if the client disconnected.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.create_task(work), asyncio.create_task(watch(), name="watch-client")
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone("the client closed the connection")
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


@contextlib.contextmanager
def noted(scope: Scope, generation: Generation) -> Iterator[None]:
    """Adds the outcome of ``generation`` to the request's line in the access log."""
    try:
        yield
    except ClientGone:
        note(scope, client_gone=True)
        raise
    finally:
        usage, first_token_s = generation.usage, generation.first_token_s
        note(
            scope,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            ttft_ms=None if first_token_s is None else round(first_token_s * 1000, 1),
            finish_reason=",".join(dict.fromkeys(generation.finish_reasons)) or None,
        )


async def collect(generation: Generation, scope: Scope, receive: Receive) -> list[Delta]:
    """Returns the whole text of each sequence, with its tokens if they are reported.

    Raises:
        TriptychError: if the request failed; ``ClientGone`` if the client disconnected.
    """
    texts: list[list[str]] = [[] for _ in generation.sequences]
    tokens: list[list[TokenReport]] = [[] for _ in generation.sequences]
    ids: list[list[int]] = [[] for _ in generation.sequences]
    ends: dict[int, Delta] = {}
    with generation, noted(scope, generation):
        async with ends_with_client(receive, generation):
            while deltas := await generation.deltas():
                for delta in deltas:
                    texts[delta.sequence].append(delta.text)
                    tokens[delta.sequence] += delta.tokens
                    ids[delta.sequence] += delta.token_ids
                    if delta.finish_reason is not None:
                        ends[delta.sequence] = delta
    return [
        ends[index]._replace(text="".join(parts), tokens=tuple(tokens[index]), token_ids=tuple(ids[index]))
        for index, parts in enumerate(texts)
    ]


class EventStream(Response):
    """Streams a generation as server-sent events.

    The status line waits for the first event, so that a refused request gets its proper status, or for the
    first comment that keeps the connection open. Written directly against ASGI: a generator behind
    ``StreamingResponse`` costs several times as much per token.
    """

    def __init__(
        self,
        generation: Generation,
        writer: StreamWriter,
        headers: Mapping[str, str] | None = None,
        *,
        keep_alive_s: float = 0,
    ) -> None:
        """Prepares the stream.

        Args:
            generation: the running answer.
            writer: writes its events.
            headers: further headers.
            keep_alive_s: seconds without an event after which the stream gets a comment; 0: never.
        """
        super().__init__(status_code=200)
        self._generation = generation
        self._writer = writer
        self._more_headers = headers or {}
        self._keep_alive_s = keep_alive_s
        self._began = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the stream to its end."""
        generation = self._generation
        with generation, noted(scope, generation):
            async with ends_with_client(receive, generation):
                idle = self._idle_watch(send) if self._keep_alive_s else None
                try:
                    await self._run(scope, send, idle)
                finally:
                    if idle is not None:
                        idle.stop()

    async def _run(self, scope: Scope, send: Send, idle: IdleWatch | None) -> None:
        generation, writer = self._generation, self._writer
        try:
            deltas = await generation.deltas()
            await self._begin(send)
            self._write_at_once(scope, idle)
            while deltas:
                if body := await self._encode(deltas):
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    if idle is not None:
                        idle.wrote()
                deltas = await generation.deltas()
            last = writer.end(generation.usage)
        except ClientGone:
            if not self._began:
                raise
            note(scope, client_gone=True)
            return
        except Exception as error:
            if not self._began:
                raise
            seen = as_stream_error(error)
            note_error(scope, seen)
            last = writer.error(seen)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _begin(self, send: Send) -> None:
        """Sends the status line, and the events before the first delta, unless they have been sent."""
        if self._began:
            return
        headers = [*STREAM_HEADERS, *encoded(self._more_headers)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._began = True
        if begin := self._writer.begin():
            await send({"type": "http.response.body", "body": begin, "more_body": True})

    def _idle_watch(self, send: Send) -> IdleWatch:
        async def keep_alive() -> None:
            await self._begin(send)
            await send({"type": "http.response.body", "body": self._writer.keep_alive(), "more_body": True})

        return IdleWatch(self._keep_alive_s, lambda: self._generation.interrupt(keep_alive))

    def _write_at_once(self, scope: Scope, idle: IdleWatch | None) -> None:
        """Lets plain tokens go straight to the connection from now on."""
        connection = BodyWriter.of(scope)
        if connection is None:
            return
        encode = self._writer.write
        write = connection.write if idle is None else idle.noting(connection.write)

        def on_delta(delta: Delta) -> None:
            if body := encode(delta):
                write(body)

        self._generation.stream_to(connection.is_ready, on_delta)

    async def _encode(self, deltas: list[Delta]) -> bytes:
        if not self._generation.reports_prompts:
            return self._encoded(deltas)
        # The reports of a long prompt are megabytes: they are encoded in a thread.
        size = sum(1 + len(token.top) for delta in deltas for token in delta.tokens)
        return await self._generation.worker.finish(size, lambda: self._encoded(deltas))

    def _encoded(self, deltas: list[Delta]) -> bytes:
        return b"".join(map(self._writer.write, deltas))
