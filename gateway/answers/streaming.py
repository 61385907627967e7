"""Responses that take time: streamed as they grow, or collected. Both stop when the client disconnects.

Streams are server-sent events, byte for byte as OpenAI sends them. The parts that are the same in every chunk
are encoded once per answer: a chunk then costs one small JSON string.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, Final, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.answers.generation import Delta, Generation
from gateway.answers.logprobs import Reporter, TokenReport
from gateway.answers.resumable import ChunkNumbers
from gateway.http.errors import ClientGone, error_body, internal
from gateway.http.middleware import note
from gateway.parsers.events import CallArguments, CallRevoked, CallStart, Event, Reasoning, Text
from protos.errors import TriptychError
from protos.logs import get_logger

DONE: Final = b"data: [DONE]\n\n"
EVENT_STREAM: Final = "text/event-stream; charset=utf-8"


def error_event(error: TriptychError) -> bytes:
    """Returns the event for an error in mid-stream, after the status line has been sent."""
    return b"data: " + orjson.dumps(error_body(error)) + b"\n\n"


class Chunks(ABC):
    """Encodes the chunks of one streamed answer.

    Subclasses define the form of a choice.
    """

    object: str
    answer_id: str
    """The answer's id."""
    _before_text: bytes
    _after_text: bytes

    def __init__(
        self, answer_id: str, created: int, model: str, *, with_usage: bool, reporter: Reporter | None = None
    ) -> None:
        """Encodes the constant parts.

        Args:
            answer_id: the answer's id.
            created: seconds since the epoch.
            model: the served name.
            with_usage: whether a usage chunk will follow; every other chunk then has ``"usage":null``, as
                OpenAI's do.
            reporter: writes log-probabilities, if they were asked for.
        """
        self.answer_id = answer_id
        fields = {"id": answer_id, "object": self.object, "created": created, "model": model}
        self._head = b"data: " + orjson.dumps(fields)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"
        self._starts: dict[int, bytes] = {}
        self._reporter = reporter

    def set_usage(self, usage: dict[str, Any]) -> None:
        """Puts ``usage`` into every chunk from now on."""
        self._tail = b'],"usage":' + orjson.dumps(usage) + b"}\n\n"

    @abstractmethod
    def opening(self, index: int) -> bytes:
        """Returns the chunk before a choice's first text."""

    @abstractmethod
    def write(self, delta: Delta) -> bytes:
        """Returns the chunks for a delta, without looking for thinking or calls in its text."""

    def usage(self, usage: dict[str, Any]) -> bytes:
        """Returns the chunk without choices that ends a stream with usage."""
        return self._head + b'],"usage":' + orjson.dumps(usage) + b"}\n\n"

    def _text(self, index: int, text: str) -> bytes:
        """Returns a chunk with nothing but text."""
        start = self._starts.get(index)
        if start is None:
            start = self._starts[index] = self._head + b'{"index":%d,' % index + self._before_text
        return start + orjson.dumps(text) + self._after_text + self._tail

    def _choice(self, choice: dict[str, Any]) -> bytes:
        return self._head + orjson.dumps(choice) + self._tail


class ChatChunks(Chunks):
    """Chunks of a chat completion."""

    object = "chat.completion.chunk"
    _before_text = b'"delta":{"content":'
    _after_text = b'},"logprobs":null,"finish_reason":null}'

    def opening(self, index: int) -> bytes:
        """Returns the chunk with the role."""
        return self._delta(index, {"role": "assistant", "content": "", "refusal": None}, ())

    def write(self, delta: Delta) -> bytes:
        """Returns a chunk with more content, if any, and at the end a separate chunk with the reason."""
        index, text, reason, stop_reason, tokens = delta
        content = self.text(index, text, tokens) if text or tokens else b""
        return content if reason is None else content + self.end(index, reason, stop_reason)

    def text(self, index: int, text: str, tokens: Sequence[TokenReport] = ()) -> bytes:
        """Returns a chunk with more content, and with log-probabilities if there are ``tokens``."""
        return self._delta(index, {"content": text}, tokens) if tokens else self._text(index, text)

    def event(self, index: int, event: Event, tokens: Sequence[TokenReport] = ()) -> bytes:
        """Returns the chunk for an event; nothing for a revoked call, which a stream cannot take back."""
        delta: dict[str, Any]
        match event:
            case Text(text):
                return self.text(index, text, tokens)
            case Reasoning(text):
                # Under both names that clients know: vLLM's and DeepSeek's.
                delta = {"reasoning": text, "reasoning_content": text}
            case CallStart(call, id_, name):
                function = {"name": name, "arguments": ""}
                delta = {"tool_calls": [{"index": call, "id": id_, "type": "function", "function": function}]}
            case CallArguments(call, fragment):
                delta = {"tool_calls": [{"index": call, "function": {"arguments": fragment}}]}
            case CallRevoked():
                return b""
        return self._delta(index, delta, tokens)

    def end(self, index: int, finish_reason: str, stop_reason: str | int | None) -> bytes:
        """Returns the chunk with an empty delta and the finish reason."""
        return self._choice({
            "index": index, "delta": {}, "logprobs": None, "finish_reason": finish_reason, "stop_reason": stop_reason,
        })  # fmt: skip

    def _delta(self, index: int, delta: dict[str, Any], tokens: Sequence[TokenReport]) -> bytes:
        logprobs = self._reporter.chat(tokens) if self._reporter and tokens else None
        return self._choice({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None})


class CompletionChunks(Chunks):
    """Chunks of a plain completion."""

    object = "text_completion"
    _before_text = b'"text":'
    _after_text = b',"logprobs":null,"finish_reason":null}'

    def opening(self, index: int) -> bytes:  # noqa: ARG002 - as the base's
        """Returns nothing: plain completions have no role."""
        return b""

    def write(self, delta: Delta) -> bytes:
        """Returns a chunk with more text; the last one also has the reason."""
        index, text, reason, stop_reason, tokens = delta
        if reason is None and not tokens:
            return self._text(index, text) if text else b""
        logprobs = self._reporter.completion(tokens) if self._reporter and tokens else None
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return self._choice(choice if reason is None else {**choice, "stop_reason": stop_reason})


T = TypeVar("T")

_HEADERS = [
    (b"content-type", EVENT_STREAM.encode()),
    (b"cache-control", b"no-cache"),
    # Proxies (nginx) otherwise buffer the stream.
    (b"x-accel-buffering", b"no"),
]


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
        usage = generation.usage
        note(scope, prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens)


async def collect(generation: Generation, scope: Scope, receive: Receive) -> list[Delta]:
    """Returns the whole text of each sequence, with its tokens if they are reported.

    Raises:
        TriptychError: if the request failed; ``ClientGone`` if the client disconnected.
    """
    texts: list[list[str]] = [[] for _ in generation.sequences]
    tokens: list[list[TokenReport]] = [[] for _ in generation.sequences]
    ends: dict[int, Delta] = {}
    with generation, noted(scope, generation):
        async with ends_with_client(receive, generation):
            while deltas := await generation.deltas():
                for delta in deltas:
                    texts[delta.sequence].append(delta.text)
                    tokens[delta.sequence] += delta.tokens
                    if delta.finish_reason is not None:
                        ends[delta.sequence] = delta
    return [
        ends[index]._replace(text="".join(parts), tokens=tuple(tokens[index]))
        for index, parts in enumerate(texts)
    ]


class EventStream(Response):
    """Streams a generation as server-sent events.

    The status line waits for the first event, so that a refused request gets its proper status. Written
    directly against ASGI: a generator behind ``StreamingResponse`` costs several times as much per token.
    """

    def __init__(
        self,
        generation: Generation,
        chunks: Chunks,
        write: Callable[[Delta], bytes],
        *,
        include_usage: bool,
        continuous_usage: bool,
        numbers: ChunkNumbers | None = None,
    ) -> None:
        """Prepares the stream.

        Args:
            generation: the running answer.
            chunks: encodes openings and usage.
            write: encodes each delta.
            include_usage: end with a usage chunk.
            continuous_usage: put the usage so far into every chunk.
            numbers: puts ids on the chunks of a resumable stream.
        """
        super().__init__(status_code=200)
        self._generation = generation
        self._chunks = chunks
        self._write = write
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._numbers = numbers
        self._opened = [False] * len(generation.sequences)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the stream to its end."""
        generation = self._generation
        with generation, noted(scope, generation):
            async with ends_with_client(receive, generation):
                deltas = await generation.deltas()
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                try:
                    while deltas:
                        if body := await self._encode(deltas):
                            await send({"type": "http.response.body", "body": body, "more_body": True})
                        deltas = await generation.deltas()
                    last = self._chunks.usage(generation.usage.body()) if self._include_usage else b""
                    last = self._numbers.last(last) if self._numbers else last
                except ClientGone:
                    note(scope, client_gone=True)
                    return
                except Exception as error:  # noqa: BLE001 - the stream must report it
                    last = error_event(_as_error(error))
                await send({"type": "http.response.body", "body": last + DONE, "more_body": False})

    async def _encode(self, deltas: list[Delta]) -> bytes:
        if self._continuous_usage:
            self._chunks.set_usage(self._generation.usage.body())
        if not self._generation.reports_prompts:
            return self._encoded(deltas)
        # The reports of a long prompt are megabytes: they are encoded in a thread.
        size = sum(1 + len(token.top) for delta in deltas for token in delta.tokens)
        return await self._generation.worker.finish(size, lambda: self._encoded(deltas))

    def _encoded(self, deltas: list[Delta]) -> bytes:
        out = []
        for delta in deltas:
            choice, chunks = delta.sequence, self._write(delta)
            if not self._opened[choice]:
                self._opened[choice] = True
                chunks = self._chunks.opening(choice) + chunks
            out.append(self._numbers.number(choice, chunks) if self._numbers else chunks)
        return b"".join(out)


def _as_error(error: Exception) -> TriptychError:
    """Logs a failure in mid-stream; returns what the client sees of it."""
    if isinstance(error, TriptychError):
        get_logger().warning("stream failed", error=str(error), code=type(error).__name__)
        return error
    get_logger().exception("stream failed")
    return internal(error)
