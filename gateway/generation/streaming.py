"""Responses that take time: streamed as they grow, or collected. Both stop when the client disconnects."""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.generation.generation import Generation, Usage
from gateway.generation.sequence_text import Delta, Reporter
from gateway.http.errors import ClientGone, internal, note_error
from gateway.http.middleware import note
from gateway.http.protocol import BodyWriter
from gateway.schemas.sampling import SamplingRequest
from protos.errors import TriptychError
from protos.service.backpressure import UnreadLimits
from protos.service.logs import get_logger

EVENT_STREAM: Final = "text/event-stream; charset=utf-8"
KEEP_ALIVE: Final = b": keep-alive\n\n"

STREAM_HEADERS: Final[tuple[tuple[bytes, bytes], ...]] = (
    (b"content-type", EVENT_STREAM.encode()),
    (b"cache-control", b"no-cache"),
    # Proxies (nginx) otherwise buffer the stream.
    (b"x-accel-buffering", b"no"),
)


def _seen_by_client(error: Exception) -> TriptychError:
    """Logs the failure of a stream after its start; returns the client's view of it."""
    if isinstance(error, TriptychError):
        get_logger().warning("stream failed", error=str(error), code=type(error).__name__)
        return error
    get_logger().exception("stream failed")
    return internal(error)


class IdleWatch:
    """Calls a function whenever ``after_s`` seconds have passed without a write, until it is stopped."""

    __slots__ = ("_after_s", "_loop", "_on_idle", "_timer", "_wrote_s")

    def __init__(self, after_s: float, on_idle: Callable[[], None]) -> None:
        """Starts to watch."""
        self._after_s = after_s
        self._on_idle = on_idle
        self._loop = asyncio.get_running_loop()
        self._wrote_s = self._loop.time()
        self._timer = self._loop.call_later(after_s, self._check)

    def wrote(self) -> None:
        """Notes a write."""
        self._wrote_s = self._loop.time()

    def stop(self) -> None:
        """Ends the watch."""
        self._timer.cancel()

    def _check(self) -> None:
        # One timer an interval, however many writes there are: it is set again for what is left.
        left = self._wrote_s + self._after_s - self._loop.time()
        if left <= 0:
            self.wrote()
            self._on_idle()
            left = self._after_s
        self._timer = self._loop.call_later(left, self._check)


class ResponseWriter(ABC):
    """Writes the body of an answer in the form of a protocol."""

    streams: ClassVar[bool] = True
    """Whether :meth:`write` returns events; otherwise :meth:`end` returns the whole body."""

    def headers(self, size: int) -> Sequence[tuple[bytes, bytes]]:  # noqa: ARG002 - streams have no length
        """Returns the headers about the body, given the size of a collected body."""
        return STREAM_HEADERS

    def begin(self) -> bytes:
        """Returns the events before the first delta."""
        return b""

    @abstractmethod
    def write(self, delta: Delta) -> bytes:
        """Returns the events for a delta; nothing if it settles none."""

    @abstractmethod
    def end(self, usage: Usage) -> bytes:
        """Returns the end of the body, after the last delta of every sequence."""

    @abstractmethod
    def error(self, error: TriptychError) -> bytes:
        """Returns the last events of a stream that failed, at any point."""

    def keep_alive(self) -> bytes:
        """Returns bytes without meaning that keep an idle connection open; after :meth:`begin`."""
        return KEEP_ALIVE

    def effort(self) -> int:
        """Estimates the work of :meth:`end`, in characters."""
        return 0


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The parts of an answer besides its deltas."""

    answer_id: str
    created: int
    """Seconds since the epoch."""
    model: str
    fingerprint: str
    """The model's; answers carry it as `system_fingerprint`."""
    body: SamplingRequest
    generation: Generation
    reporter: Reporter

    def prompt_of(self, sequence: int) -> Sequence[int]:
        """Returns the token ids of the prompt that ``sequence`` continues."""
        return list(self.generation.prompts[sequence // self.body.n].token_ids)

    def prompt_fields(self) -> list[dict[str, Any]]:
        """Returns the fields about each prompt in a collected answer."""
        found: list[dict[str, Any]] = []
        for prompt in self.generation.prompts:
            fields: dict[str, Any] = {}
            if (count := self.body.prompt_logprobs) is not None:
                fields["prompt_logprobs"] = self.reporter.prompt(prompt.token_ids, prompt.logprobs, count)
            if self.body.return_token_ids:
                fields["prompt_token_ids"] = list(prompt.token_ids)
            found.append(fields)
        return found

    def choice_fields(self, end: Delta) -> dict[str, Any]:
        """Returns the further fields of a choice of a collected answer."""
        return {"token_ids": end.token_ids} if self.body.return_token_ids else {}


class CollectedWriter(ResponseWriter):
    """Appends the deltas of each sequence, and writes a JSON body at the end."""

    streams = False

    def __init__(self, head: AnswerHead, body: Callable[[list[Delta], Usage], bytes]) -> None:
        """Starts without text; ``body`` encodes the answer from a delta with the whole of each sequence."""
        self._head = head
        self._body = body
        self._parts: list[list[Delta]] = [[] for _ in head.generation.sequences]

    def headers(self, size: int) -> Sequence[tuple[bytes, bytes]]:
        """Returns type and length."""
        return ((b"content-type", b"application/json"), (b"content-length", b"%d" % size))

    def write(self, delta: Delta) -> bytes:
        """Appends a delta."""
        self._parts[delta.sequence].append(delta)
        return b""

    def end(self, usage: Usage) -> bytes:
        """Returns the body."""
        ends = [
            parts[-1]._replace(
                text="".join(part.text for part in parts),
                tokens=tuple(token for part in parts for token in part.tokens),
                token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
            )
            for parts in self._parts
        ]
        return self._body(ends, usage)

    def error(self, error: TriptychError) -> bytes:
        """Never called: a failed answer gets no body."""
        raise AssertionError from error

    def effort(self) -> int:
        """Counts characters, tokens and their log-probabilities."""
        deltas = [delta for parts in self._parts for delta in parts]
        size = sum(1 + len(token.top) for delta in deltas for token in delta.tokens)
        size += sum(len(delta.text) + len(delta.token_ids) for delta in deltas)
        if (count := self._head.body.prompt_logprobs) is not None:
            size += (1 + count) * sum(len(prompt.token_ids) for prompt in self._head.generation.prompts)
        return size


T = TypeVar("T")


async def _disconnect(receive: Receive) -> None:
    """Waits until the client disconnects; the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


@contextlib.asynccontextmanager
async def ends_with_client(receive: Receive, generation: Generation) -> AsyncIterator[None]:
    """Fails ``generation`` with :class:`ClientGone` if the client disconnects meanwhile."""

    async def watch() -> None:
        await _disconnect(receive)
        generation.fail(ClientGone("the client closed the connection"))

    watcher = asyncio.create_task(watch(), name="watch-client")
    try:
        yield
    finally:
        watcher.cancel()


async def while_client_waits(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of ``work``; cancels it if the client disconnects meanwhile."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnect(receive), name="watch-client")
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


class Answer(Response):
    """Answers with a generation: streamed as it grows, or collected.

    The generation pushes deltas, and the writer encodes them. The bytes go straight to the connection while
    the client reads; otherwise they wait in a buffer, bounded in bytes, for the response's task. The status
    line waits for the first event, so that a refused request gets its own status.
    """

    def __init__(
        self,
        generation: Generation,
        writer: ResponseWriter,
        unread: UnreadLimits,
        headers: Mapping[str, str] | None = None,
        *,
        keep_alive_s: float = 0,
    ) -> None:
        """Prepares the answer; a stream gets a comment after ``keep_alive_s`` idle seconds (0: never)."""
        super().__init__(status_code=200)
        self._generation = generation
        self._writer = writer
        self._more_headers = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        self._keep_alive_s = keep_alive_s
        self._unread = unread.reader(self._on_slow_reader)
        self._buffer: list[bytes] = []
        self._wake = asyncio.Event()
        self._connection: BodyWriter | None = None
        self._opened = False
        self._began = False
        self._waits = False
        """Whether the response's task waits, so that bytes may overtake it."""
        self._ended = False
        self._error: Exception | None = None
        self._idle: IdleWatch | None = None

    def encode(self, deltas: Sequence[Delta]) -> bytes:
        """Encodes deltas in the writer's form."""
        write = self._writer.write
        if self._opened and len(deltas) == 1:
            return write(deltas[0])
        return self._opening() + b"".join(map(write, deltas))

    def push(self, part: bytes) -> None:
        """Writes the next bytes of a stream."""
        if self._waits and self._connection is not None and self._connection.is_ready():
            if part:
                self._connection.write(part)
                if self._idle is not None:
                    self._idle.wrote()
            return
        if not self._writer.streams:
            return
        self._buffer.append(part)
        self._unread.add(len(part))
        self._wake.set()

    def end(self, error: TriptychError | None) -> None:
        """Ends the answer, with ``error`` if it failed."""
        self._ended, self._error = True, error
        self._wake.set()

    def _on_slow_reader(self, error: TriptychError) -> None:
        self._buffer.clear()
        self._generation.fail(error)

    def _keep_alive(self) -> None:
        self.push(self._opening() + self._writer.keep_alive())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers until the generation ends or the client disconnects."""
        generation = self._generation
        with generation, noted(scope, generation):
            async with ends_with_client(receive, generation):
                self._connection = BodyWriter.from_scope(scope)
                if self._keep_alive_s and self._writer.streams:
                    self._idle = IdleWatch(self._keep_alive_s, self._keep_alive)
                try:
                    await self._run(scope, send)
                finally:
                    self._unread.close()
                    if self._idle is not None:
                        self._idle.stop()

    async def _run(self, scope: Scope, send: Send) -> None:
        try:
            self._generation.start(self)
            while not self._ended or self._buffer:
                await self._send_buffer(send)
                self._waits = self._began and not self._buffer
                if not (self._ended or self._buffer):
                    await self._wake.wait()
                self._waits = False
                self._wake.clear()
            if self._error is not None:
                raise self._error
            last = await self._generation.worker.finish(self._writer.effort(), self._last)
            await self._begin(send, len(last))
        except ClientGone:
            if not self._began:
                raise
            note(scope, client_gone=True)
            return
        except Exception as error:
            if not self._began:
                raise
            seen = _seen_by_client(error)
            note_error(scope, seen)
            last = self._writer.error(seen)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _last(self) -> bytes:
        return self._opening() + self._writer.end(self._generation.usage)

    def _opening(self) -> bytes:
        """Returns the events before the first delta, once."""
        if self._opened:
            return b""
        self._opened = True
        return self._writer.begin()

    async def _begin(self, send: Send, size: int) -> None:
        """Sends the status line, unless it has been sent."""
        if self._began:
            return
        headers = [*self._writer.headers(size), *self._more_headers]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._began = True

    async def _send_buffer(self, send: Send) -> None:
        if not self._buffer:
            return
        await self._begin(send, 0)
        parts, self._buffer = self._buffer, []
        if body := b"".join(parts):
            await send({"type": "http.response.body", "body": body, "more_body": True})
            self._unread.remove(len(body))
            if self._idle is not None:
                self._idle.wrote()
