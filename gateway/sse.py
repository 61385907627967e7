"""Server-sent events of both completions endpoints, byte for byte as OpenAI sends them.

What does not change from chunk to chunk is encoded once per answer: a chunk costs one small JSON string.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import orjson

from gateway.answer_reader import AnswerReader
from gateway.answer_reader import finish_reason as reason_with_calls
from gateway.errors import error_body
from gateway.logprobs import Reporter, TokenReport
from gateway.tools.events import CallArguments, CallRevoked, CallStart, Event, Reasoning, Text
from protos.errors import TriptychError

DONE: Final = b"data: [DONE]\n\n"


def error_event(error: TriptychError) -> bytes:
    """An error in mid-stream, when the status line is long gone."""
    return b"data: " + orjson.dumps(error_body(error)) + b"\n\n"


class Chunks:
    """Encodes the chunks of one streamed answer.

    Subclasses say how a choice looks: its text, and what surrounds it.
    """

    object: str
    _before_text: bytes
    _after_text: bytes

    def __init__(
        self, answer_id: str, created: int, model: str, *, with_usage: bool, reporter: Reporter | None = None
    ) -> None:
        """Prepares the constant parts.

        Args:
            answer_id: the answer's id.
            created: seconds since the epoch.
            model: the served name.
            with_usage: whether a usage chunk will follow; every other chunk then says ``"usage":null``, as OpenAI's do.
            reporter: writes log-probabilities, if they were asked for.
        """
        fields = {"id": answer_id, "object": self.object, "created": created, "model": model}
        self._head = b"data: " + orjson.dumps(fields)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"
        self._starts: dict[int, bytes] = {}
        self._reporter = reporter

    def delta(
        self,
        index: int,
        text: str,
        usage: dict[str, Any] | None = None,
        tokens: Sequence[TokenReport] = (),
    ) -> bytes:
        """More text of choice ``index``; with the usage so far if given, and with the log-probabilities of ``tokens`` if there are any."""
        if tokens:
            return self._choice(self._reported(index, text, tokens), usage)
        start = self._starts.get(index)
        if start is None:
            start = self._starts[index] = self._head + b'{"index":%d,' % index + self._before_text
        return start + orjson.dumps(text) + self._after_text + self._end(usage)

    def _end(self, usage: dict[str, Any] | None) -> bytes:
        return self._tail if usage is None else b'],"usage":' + orjson.dumps(usage) + b"}\n\n"

    def _choice(self, choice: dict[str, Any], usage: dict[str, Any] | None) -> bytes:
        return self._head + orjson.dumps(choice) + self._end(usage)

    def _reported(self, index: int, text: str, tokens: Sequence[TokenReport]) -> dict[str, Any]:
        """A choice with text and log-probabilities."""
        raise NotImplementedError

    def opening(self, index: int, usage: dict[str, Any] | None = None) -> bytes:
        """What comes before a choice's first text."""
        raise NotImplementedError

    def final(
        self,
        index: int,
        text: str,
        finish_reason: str,
        stop_reason: str | int | None,
        usage: dict[str, Any] | None = None,
        tokens: Sequence[TokenReport] = (),
    ) -> bytes:
        """A choice's last text and its end."""
        raise NotImplementedError

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The chunk without choices that ends a stream with usage."""
        return self._head + self._end(usage)


class ChatChunks(Chunks):
    """Chunks of a chat completion."""

    object = "chat.completion.chunk"
    _before_text = b'"delta":{"content":'
    _after_text = b'},"logprobs":null,"finish_reason":null}'

    def opening(self, index: int, usage: dict[str, Any] | None = None) -> bytes:
        """The chunk that names the role."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._choice({"index": index, "delta": delta, "logprobs": None, "finish_reason": None}, usage)

    def final(
        self,
        index: int,
        text: str,
        finish_reason: str,
        stop_reason: str | int | None,
        usage: dict[str, Any] | None = None,
        tokens: Sequence[TokenReport] = (),
    ) -> bytes:
        """The last text, if any, in a chunk of its own; then an empty delta with the reason."""
        last = self.delta(index, text, usage, tokens) if text or tokens else b""
        choice = {
            "index": index, "delta": {}, "logprobs": None, "finish_reason": finish_reason, "stop_reason": stop_reason,
        }  # fmt: skip
        return last + self._choice(choice, usage)

    def _reported(self, index: int, text: str, tokens: Sequence[TokenReport]) -> dict[str, Any]:
        logprobs = self._reporter.chat(tokens) if self._reporter else None
        return {"index": index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": None}


class ReadChunks(ChatChunks):
    """Chunks of a chat completion whose text is read for thinking and tool calls, one reader a choice."""

    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        *,
        with_usage: bool,
        new_reader: Callable[[], AnswerReader],
        named: bool,
        reporter: Reporter | None = None,
    ) -> None:
        """As the base's; see :mod:`gateway.answer_reader` for the rest."""
        super().__init__(answer_id, created, model, with_usage=with_usage, reporter=reporter)
        self._new_reader = new_reader
        self._named = named
        self._readers: dict[int, AnswerReader] = {}
        # Whose text a reader holds back, by choice: they are reported with what is told next.
        self._untold: dict[int, list[TokenReport]] = {}

    def _reader(self, index: int) -> AnswerReader:
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = self._new_reader()
        return reader

    def delta(
        self,
        index: int,
        text: str,
        usage: dict[str, Any] | None = None,
        tokens: Sequence[TokenReport] = (),
    ) -> bytes:
        """What the text settles; perhaps nothing."""
        self._untold.setdefault(index, []).extend(tokens)
        return self._events(index, self._reader(index).feed(text), usage)

    def final(
        self,
        index: int,
        text: str,
        finish_reason: str,
        stop_reason: str | int | None,
        usage: dict[str, Any] | None = None,
        tokens: Sequence[TokenReport] = (),
    ) -> bytes:
        """The last text, what was held back, and the end."""
        reader = self._reader(index)
        self._untold.setdefault(index, []).extend(tokens)
        rest = self._events(index, [*reader.feed(text), *reader.finish()], usage)
        reason = reason_with_calls(finish_reason, reader.num_calls, named=self._named)
        untold = self._told(index)
        if untold:
            rest += super().delta(index, "", usage, untold)
        return rest + super().final(index, "", reason, stop_reason, usage)

    def _events(self, index: int, events: Sequence[Event], usage: dict[str, Any] | None) -> bytes:
        return b"".join([self._event(index, event, usage) for event in events])

    def _event(self, index: int, event: Event, usage: dict[str, Any] | None) -> bytes:
        delta: dict[str, Any]
        match event:
            case Text(text):
                return super().delta(index, text, usage, self._told(index))
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
        tokens = self._told(index)
        logprobs = self._reporter.chat(tokens) if self._reporter and tokens else None
        return self._choice(
            {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}, usage
        )

    def _told(self, index: int) -> Sequence[TokenReport]:
        """The tokens that were not reported yet; they are now."""
        tokens, self._untold[index] = self._untold.get(index, []), []
        return tokens


class CompletionChunks(Chunks):
    """Chunks of a plain completion."""

    object = "text_completion"
    _before_text = b'"text":'
    _after_text = b',"logprobs":null,"finish_reason":null}'

    def opening(self, index: int, usage: dict[str, Any] | None = None) -> bytes:  # noqa: ARG002 - as the base's
        """Nothing: plain completions have no role."""
        return b""

    def final(
        self,
        index: int,
        text: str,
        finish_reason: str,
        stop_reason: str | int | None,
        usage: dict[str, Any] | None = None,
        tokens: Sequence[TokenReport] = (),
    ) -> bytes:
        """The last text together with the reason."""
        choice = self._reported(index, text, tokens)
        choice |= {"finish_reason": finish_reason, "stop_reason": stop_reason}
        return self._choice(choice, usage)

    def _reported(self, index: int, text: str, tokens: Sequence[TokenReport]) -> dict[str, Any]:
        logprobs = self._reporter.completion(tokens) if self._reporter and tokens else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
