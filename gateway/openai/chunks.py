"""The chunks of OpenAI's completions, and the writer that sends them as a stream.

Chunks are OpenAI's byte for byte. The parts that are the same in every chunk are encoded once per answer: a
chunk then costs one small JSON string.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import orjson

from gateway.generation.answer_reader import AnswerReader, DeltaReader
from gateway.generation.generation import Usage
from gateway.generation.logprobs import Reporter, TokenReport
from gateway.generation.respond import StreamStart
from gateway.generation.sequence_text import Delta
from gateway.generation.streaming import ResponseWriter
from gateway.http.errors import error_body
from gateway.parsers.events import CallArguments, CallRevoked, CallStart, Event, Reasoning, Text
from gateway.schemas.sampling import SamplingRequest
from protos.errors import TriptychError

DONE: Final = b"data: [DONE]\n\n"


def last_error(error: TriptychError) -> bytes:
    """Returns OpenAI's error object and ``[DONE]``, for an error after the status line has been sent."""
    return b"data: " + orjson.dumps(error_body(error)) + b"\n\n" + DONE


class Chunks(ABC):
    """Encodes the chunks of one streamed answer.

    Subclasses define the form of a choice.
    """

    object: str
    answer_id: str
    """The answer's id."""
    last_fields: ClassVar[Mapping[str, str]] = {}
    """Further constant fields of chunks that end a choice or the stream."""
    _before_text: bytes
    _after_text: bytes

    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        *,
        with_usage: bool,
        reporter: Reporter | None = None,
        fingerprint: str | None = None,
        prompt_of: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        """Encodes the constant parts.

        Args:
            answer_id: the answer's id.
            created: seconds since the epoch.
            model: the served name.
            with_usage: whether a usage chunk will follow; every other chunk then has ``"usage":null``, as
                OpenAI's do.
            reporter: writes log-probabilities, if they were asked for.
            fingerprint: of the model, for the chunks that end a choice or the stream.
            prompt_of: returns the token ids of a choice's prompt, for its first chunk; ``None``: it has none.
        """
        self.answer_id = answer_id
        self._fields = {"id": answer_id, "object": self.object, "created": created, "model": model}
        self._head = _head(self._fields)
        self._last_head = _head({**self._fields, **self.last_fields, "system_fingerprint": fingerprint})
        self._tail = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"
        self._starts: dict[int, bytes] = {}
        self._reporter = reporter
        self._prompt_of = prompt_of

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
        return self._last_head + b'],"usage":' + orjson.dumps(usage) + b"}\n\n"

    def _text(self, index: int, text: str) -> bytes:
        """Returns a chunk with nothing but text."""
        start = self._starts.get(index)
        if start is None:
            start = self._starts[index] = self._head + b'{"index":%d,' % index + self._before_text
        return start + orjson.dumps(text) + self._after_text + self._tail

    def _choice(self, choice: dict[str, Any]) -> bytes:
        head = self._head if choice["finish_reason"] is None else self._last_head
        return head + orjson.dumps(choice) + self._tail


def _head(fields: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(fields)[:-1] + b',"choices":['


class ChatChunks(Chunks):
    """Chunks of a chat completion."""

    object = "chat.completion.chunk"
    last_fields: ClassVar[Mapping[str, str]] = {"service_tier": "default"}
    _before_text = b'"delta":{"content":'
    _after_text = b'},"logprobs":null,"finish_reason":null}'

    def opening(self, index: int) -> bytes:
        """Returns the chunk with the role."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        if self._prompt_of is None:
            return self._delta(index, delta, ())
        head = _head({**self._fields, "prompt_token_ids": self._prompt_of(index)})
        return self._delta(index, delta, ()).replace(self._head, head)

    def write(self, delta: Delta) -> bytes:
        """Returns a chunk with more content, if any, and at the end a separate chunk with the reason."""
        index, text, reason, stop_reason, tokens, token_ids = delta
        if token_ids:
            content = self._delta(index, {"content": text}, tokens, token_ids)
        else:
            content = self.text(index, text, tokens) if text or tokens else b""
        return content if reason is None else content + self.end(index, reason, stop_reason)

    def ids(self, index: int, token_ids: Sequence[int]) -> bytes:
        """Returns a chunk with nothing but the ids of new tokens."""
        return self._delta(index, {}, (), token_ids)

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

    def _delta(
        self, index: int, delta: dict[str, Any], tokens: Sequence[TokenReport], token_ids: Sequence[int] = ()
    ) -> bytes:
        logprobs = self._reporter.chat(tokens) if self._reporter and tokens else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        return self._choice({**choice, "token_ids": token_ids} if token_ids else choice)


class CompletionChunks(Chunks):
    """Chunks of a plain completion."""

    object = "text_completion"
    _before_text = b'"text":'
    _after_text = b',"logprobs":null,"finish_reason":null}'

    def opening(self, index: int) -> bytes:
        """Returns nothing, or the ids of the prompt: plain completions have no role."""
        if self._prompt_of is None:
            return b""
        choice = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
        return self._choice({**choice, "prompt_token_ids": self._prompt_of(index)})

    def write(self, delta: Delta) -> bytes:
        """Returns a chunk with more text; the last one also has the reason."""
        index, text, reason, stop_reason, tokens, token_ids = delta
        if reason is None and not tokens and not token_ids:
            return self._text(index, text) if text else b""
        logprobs = self._reporter.completion(tokens) if self._reporter and tokens else None
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        if token_ids:
            choice["token_ids"] = token_ids
        return self._choice(choice if reason is None else {**choice, "stop_reason": stop_reason})


class ChunkWriter(ResponseWriter):
    """Writes a stream of chunks that ends with ``[DONE]``."""

    def __init__(
        self,
        chunks: Chunks,
        write: Callable[[Delta], bytes],
        *,
        with_usage: bool = False,
        usage_so_far: Callable[[], Usage] | None = None,
    ) -> None:
        """Creates a writer.

        Args:
            chunks: encodes openings and usage.
            write: encodes each delta.
            with_usage: end with a usage chunk.
            usage_so_far: returns the usage that every chunk carries; ``None``: chunks carry none.
        """
        self._chunks = chunks
        self._write = write
        self._with_usage = with_usage
        self._usage_so_far = usage_so_far
        self._opened: set[int] = set()

    def write(self, delta: Delta) -> bytes:
        """Returns the chunks for a delta, behind the choice's opening if it is the first."""
        if self._usage_so_far is not None:
            self._chunks.set_usage(self._usage_so_far().body())
        choice, chunks = delta.sequence, self._write(delta)
        if choice not in self._opened:
            self._opened.add(choice)
            return self._chunks.opening(choice) + chunks
        return chunks

    def end(self, usage: Usage) -> bytes:
        """Returns the usage chunk, if it was asked for, and ``[DONE]``."""
        return self._chunks.usage(usage.body()) + DONE if self._with_usage else DONE

    def error(self, error: TriptychError) -> bytes:
        """Returns OpenAI's error object and ``[DONE]``."""
        return last_error(error)


class ChatStreamWriter:
    """Writes the events that readers find in the text, with one reader per choice."""

    def __init__(self, chunks: ChatChunks, new_reader: Callable[[], AnswerReader], *, named: bool) -> None:
        """Creates a writer.

        Args:
            chunks: encodes the chunks.
            new_reader: makes the reader of one choice.
            named: whether the request names the tool to call.
        """
        self._chunks = chunks
        self._new_reader = new_reader
        self._named = named
        self._choices: dict[int, DeltaReader] = {}

    def write(self, delta: Delta) -> bytes:
        """Returns the chunks that the text settles; at the end also the text held back, and the reason."""
        index, reason, chunks = delta.sequence, delta.finish_reason, self._chunks
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = DeltaReader(self._new_reader())
        out = [chunks.event(index, event, tokens) for event, tokens in choice.read(delta)]
        if delta.token_ids:
            out.append(chunks.ids(index, delta.token_ids))
        if reason is not None:
            if rest := choice.take_reports():
                out.append(chunks.text(index, "", rest))
            reason = finish_reason(reason, choice.num_calls, named=self._named)
            out.append(chunks.end(index, reason, delta.stop_reason))
        return b"".join(out)


def finish_reason(reason: str, num_calls: int, *, named: bool) -> str:
    """Returns OpenAI's reason for an answer with calls; for the call of a named tool it stays "stop"."""
    return "tool_calls" if reason == "stop" and num_calls and not named else reason


def chunk_writer(
    start: StreamStart, body: SamplingRequest, chunks: Chunks, write: Callable[[Delta], bytes]
) -> ChunkWriter:
    """Returns the writer of a stream in OpenAI's chunks; ``write`` encodes each delta."""
    return ChunkWriter(
        chunks,
        write,
        with_usage=body.include_usage,
        usage_so_far=start.usage_so_far if body.continuous_usage else None,
    )
