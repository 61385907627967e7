"""Writes messages, whole or as events, and errors in the form of Anthropic's API.

Its clients wait and retry after the status 529 and its error type.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import orjson

from gateway.generation.answer_plan import AnswerPlan, DeltaReader
from gateway.generation.generation import Usage
from gateway.generation.sequence_text import Delta
from gateway.generation.streaming import AnswerHead, ResponseWriter
from gateway.http.errors import Forbidden, PayloadTooLarge, ShapedError, Unauthorized
from gateway.messages_api.schemas import AnswerBlock, MessageAnswer, MessageHead, TokenCounts
from gateway.parsers.events import CallArguments, CallStart, Event, Reasoning, Text, settled
from protos.errors import InvalidArgument, NotFound, Overloaded, TimedOut, TriptychError, Unavailable
from protos.service.logs import request_id

ID_PREFIX: Final = "msg_"


class _StopReason(NamedTuple):
    """The end of an answer."""

    reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    sequence: str | None = None
    """The stop sequence at the end of the answer."""

    @classmethod
    def from_delta(cls, last: Delta, *, called: bool, complete: bool) -> "_StopReason":
        """Returns the reason for an end with calls, of which the last may be incomplete."""
        if last.finish_reason == "length":
            return cls("max_tokens")
        if called and complete:
            return cls("tool_use")
        if isinstance(last.stop_reason, str):
            # A call cut short by a stop sequence must not run.
            return cls("stop_sequence", last.stop_reason)
        return cls("tool_use" if called else "end_turn")


def _usage_body(usage: Usage) -> TokenCounts:
    """Returns the token counts. ``input_tokens`` excludes tokens from the prefix cache.

    Every computed prefix is cached at no further cost, so no tokens count as created.
    """
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.thinking_tokens},
    }


def _message_head(answer_id: str, model: str) -> MessageHead:
    return {"id": answer_id, "type": "message", "role": "assistant", "model": model}


def _signature_of(answer_id: str, index: int) -> str:
    """Returns the signature of a thinking block, sent back by clients and not verified."""
    return hashlib.blake2b(f"{answer_id}/{index}".encode(), digest_size=32).hexdigest()


def _text_block(text: str) -> AnswerBlock:
    return {"type": "text", "text": text}


def _thinking_block(thinking: str, signature: str) -> AnswerBlock:
    return {"type": "thinking", "thinking": thinking, "signature": signature}


def _tool_use_block(call: CallStart, arguments: dict[str, Any]) -> AnswerBlock:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _input_of(arguments: str) -> dict[str, Any] | None:
    """Returns the input of a call; ``None`` if its text is incomplete."""
    try:
        found = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def message_body(
    head: AnswerHead, end: Delta, events: Sequence[Event], usage: Usage, *, omit_thinking: bool
) -> MessageAnswer:
    """Returns the message of a whole answer."""
    content, calls, complete = list[AnswerBlock](), dict[int, tuple[AnswerBlock, list[str]]](), True
    for event in settled(events):
        match event:
            case Text(text):
                content.append(_text_block(text))
            case Reasoning(text):
                signature = _signature_of(head.answer_id, len(content))
                content.append(_thinking_block("" if omit_thinking else text, signature))
            case CallStart(number):
                content.append(_tool_use_block(event, {}))
                calls[number] = (content[-1], [])
            case CallArguments(number, text):
                calls[number][1].append(text)
    for block, pieces in calls.values():
        found = _input_of("".join(pieces))
        complete, block["input"] = found is not None, found or {}
    stop = _StopReason.from_delta(end, called=bool(calls), complete=complete)
    return {
        **_message_head(head.answer_id, head.model),
        # An answer without text has an empty block: clients read the first one.
        "content": content or [_text_block("")],
        "stop_reason": stop.reason,
        "stop_sequence": stop.sequence,
        "usage": {**_usage_body(usage), "service_tier": "standard"},
    }


_OVERLOADED_STATUS: Final = 529

# Looked up along a class' bases, as the table of OpenAI's errors.
_TYPES: Final[dict[type[TriptychError], str]] = {
    InvalidArgument: "invalid_request_error",
    PayloadTooLarge: "request_too_large",
    Unauthorized: "authentication_error",
    Forbidden: "permission_error",
    NotFound: "not_found_error",
    Overloaded: "rate_limit_error",
    Unavailable: "overloaded_error",
    TimedOut: "overloaded_error",
    TriptychError: "api_error",
}


def error_body(error: TriptychError) -> dict[str, Any]:
    """Returns Anthropic's error object."""
    kind = next(_TYPES[cls] for cls in type(error).__mro__ if cls in _TYPES)
    details = {"type": kind, "message": error.message}
    return {"type": "error", "error": details, "request_id": request_id()}


def shape(error: TriptychError) -> ShapedError:
    """Returns status, body and headers of an error."""
    overloaded = isinstance(error, Unavailable | TimedOut)
    return ShapedError(
        _OVERLOADED_STATUS if overloaded else error.http_status,
        error_body(error),
        {"request-id": request_id()},
    )


def _encode_event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


class MessageStreamWriter(ResponseWriter):
    """Writes the blocks of a message, each closed before the next."""

    def __init__(self, head: AnswerHead, plan: AnswerPlan, *, omit_thinking: bool) -> None:
        """Reads the text by ``plan``; ``omit_thinking`` leaves thinking blocks empty."""
        self._head = head
        self._omit_thinking = omit_thinking
        self._reader = None if plan.plain else DeltaReader(plan.reader())
        self._stop = _StopReason("end_turn")
        self._index = -1
        """Of the newest block."""
        self._open: type[Event] | None = None
        """The kind of the open block."""
        self._call_blocks: dict[int, int] = {}
        """The block of each call."""
        self._arguments: list[str] = []
        """Of the newest call."""
        self._before_text = b""

    def begin(self) -> bytes:
        """Returns the start of the message, and a ping as Anthropic sends it."""
        usage = {**_usage_body(self._head.generation.usage), "output_tokens": 0, "service_tier": "standard"}
        message = {
            **_message_head(self._head.answer_id, self._head.model),
            "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage,
        }  # fmt: skip
        return _encode_event("message_start", message=message) + _encode_event("ping")

    def write(self, delta: Delta) -> bytes:
        """Returns the events settled by the text; at the end also the end of the last block."""
        if self._reader is not None:
            out = b"".join([self._event(event) for event, _ in self._reader.read(delta)])
        else:
            out = self._text(delta.text) if delta.text else b""
        if delta.finish_reason is None:
            return out
        called = self._reader is not None and self._reader.num_calls > 0
        complete = _input_of("".join(self._arguments)) is not None
        self._stop = _StopReason.from_delta(delta, called=called, complete=complete)
        if self._index < 0:
            out += self._start(Text, _text_block(""))
        return out + self._close()

    def end(self, usage: Usage) -> bytes:
        """Returns the stop reason with the token counts, and the end of the message."""
        stop = {"stop_reason": self._stop.reason, "stop_sequence": self._stop.sequence}
        return _encode_event("message_delta", delta=stop, usage=_usage_body(usage)) + _encode_event(
            "message_stop"
        )

    def error(self, error: TriptychError) -> bytes:
        """Returns the last event of a failed stream."""
        return _encode_event("error", **error_body(error))

    def keep_alive(self) -> bytes:
        """Returns a ping: Anthropic's API has no comments."""
        return _encode_event("ping")

    def _event(self, event: Event) -> bytes:
        match event:
            case Text(text):
                return self._text(text)
            case Reasoning(text):
                out = b"" if self._open is Reasoning else self._start(Reasoning, _thinking_block("", ""))
                return out if self._omit_thinking else out + self._delta("thinking_delta", thinking=text)
            case CallStart(number):
                out = self._start(CallStart, _tool_use_block(event, {}))
                self._call_blocks[number], self._arguments = self._index, []
                return out
            case CallArguments(number, fragment):
                self._arguments.append(fragment)
                block = self._call_blocks[number]
                return self._delta("input_json_delta", block, partial_json=fragment)
            case _:
                return b""

    def _text(self, text: str) -> bytes:
        out = b"" if self._open is Text else self._start(Text, _text_block(""))
        return b"%b%b}}\n\n" % (out + self._before_text, orjson.dumps(text))

    def _start(self, kind: type[Event], block: AnswerBlock) -> bytes:
        """Closes the open block and opens the next."""
        out = self._close()
        self._index, self._open = self._index + 1, kind
        if kind is Text:
            # The constant part of most events of a stream.
            self._before_text = (
                b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
                b'"delta":{"type":"text_delta","text":' % self._index
            )
        return out + _encode_event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        out = b""
        if self._open is Reasoning:
            out = self._delta("signature_delta", signature=_signature_of(self._head.answer_id, self._index))
        self._open = None
        return out + _encode_event("content_block_stop", index=self._index)

    def _delta(self, kind: str, index: int | None = None, **fields: str) -> bytes:
        index = self._index if index is None else index
        return _encode_event("content_block_delta", index=index, delta={"type": kind, **fields})
