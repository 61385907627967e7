"""Writes a streamed answer as Anthropic's events: the message's start, its blocks in turn, and its end."""

from collections.abc import Callable
from typing import Any

import orjson

from gateway.answers.answer_plan import AnswerPlan
from gateway.answers.delta_reader import DeltaReader
from gateway.answers.generation import Usage
from gateway.answers.sequence_text import Delta
from gateway.answers.streaming import ResponseWriter
from gateway.messages_api.answer_body import (
    StopReason,
    input_of,
    message_head,
    signature_of,
    text_block,
    thinking_block,
    tool_use_block,
    usage_body,
)
from gateway.messages_api.answers import AnswerBlock
from gateway.messages_api.error_shape import error_body
from gateway.parsers.events import CallArguments, CallStart, Event, Reasoning, Text
from protos.errors import TriptychError


def encode_event(kind: str, **fields: Any) -> bytes:
    """Returns one server-sent event of the type ``kind``."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


def error_event(error: TriptychError) -> bytes:
    """Returns the event that ends a stream that failed."""
    return encode_event("error", **error_body(error))


class MessageStreamWriter(ResponseWriter):
    """Writes the blocks of one message. One is open at a time."""

    def __init__(
        self,
        answer_id: str,
        model: str,
        plan: AnswerPlan,
        usage_so_far: Callable[[], Usage],
        *,
        omit_thinking: bool,
    ) -> None:
        """Creates a writer.

        Args:
            answer_id: the message's id.
            model: the model's name, as the client wrote it.
            plan: how the text is read.
            usage_so_far: returns the token counts.
            omit_thinking: write thinking blocks without their text.
        """
        self._answer_id = answer_id
        self._model = model
        self._usage_so_far = usage_so_far
        self._omit_thinking = omit_thinking
        self._reader = None if plan.plain else DeltaReader(plan.reader())
        self._stop = StopReason("end_turn")
        self._index = -1
        """Of the newest block."""
        self._open: type[Event] | None = None
        """The kind of the block that is open."""
        self._call_blocks: dict[int, int] = {}
        """The block of each call."""
        self._arguments: list[str] = []
        """Of the newest call."""
        self._before_text = b""

    def begin(self) -> bytes:
        """Returns the start of the message, and a ping as Anthropic sends it."""
        usage = {**usage_body(self._usage_so_far()), "output_tokens": 0, "service_tier": "standard"}
        message = {
            **message_head(self._answer_id, self._model),
            "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage,
        }  # fmt: skip
        return encode_event("message_start", message=message) + encode_event("ping")

    def write(self, delta: Delta) -> bytes:
        """Returns the events that the text settles; at the end also the end of the last block."""
        if self._reader is not None:
            out = b"".join([self._event(event) for event, _ in self._reader.read(delta)])
        else:
            out = self._text(delta.text) if delta.text else b""
        if delta.finish_reason is None:
            return out
        called = self._reader is not None and self._reader.num_calls > 0
        complete = input_of("".join(self._arguments)) is not None
        self._stop = StopReason.of(delta, called=called, complete=complete)
        if self._index < 0:
            out += self._start(Text, text_block(""))
        return out + self._close()

    def end(self, usage: Usage) -> bytes:
        """Returns the stop reason with the token counts, and the end of the message."""
        stop = {"stop_reason": self._stop.reason, "stop_sequence": self._stop.sequence}
        return encode_event("message_delta", delta=stop, usage=usage_body(usage)) + encode_event(
            "message_stop"
        )

    def error(self, error: TriptychError) -> bytes:
        """Returns the event that ends a stream that failed."""
        return error_event(error)

    def keep_alive(self) -> bytes:
        """Returns a ping: Anthropic's API has no comments."""
        return encode_event("ping")

    def _event(self, event: Event) -> bytes:
        match event:
            case Text(text):
                return self._text(text)
            case Reasoning(text):
                out = b"" if self._open is Reasoning else self._start(Reasoning, thinking_block("", ""))
                return out if self._omit_thinking else out + self._delta("thinking_delta", thinking=text)
            case CallStart(number):
                out = self._start(CallStart, tool_use_block(event, {}))
                self._call_blocks[number], self._arguments = self._index, []
                return out
            case CallArguments(number, fragment):
                self._arguments.append(fragment)
                block = self._call_blocks[number]
                return self._delta("input_json_delta", block, partial_json=fragment)
            case _:
                return b""

    def _text(self, text: str) -> bytes:
        out = b"" if self._open is Text else self._start(Text, text_block(""))
        return b"%b%b}}\n\n" % (out + self._before_text, orjson.dumps(text))

    def _start(self, kind: type[Event], block: AnswerBlock) -> bytes:
        """Closes the open block and opens the next one."""
        out = self._close()
        self._index, self._open = self._index + 1, kind
        if kind is Text:
            # The constant part of most events of a stream.
            self._before_text = (
                b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
                b'"delta":{"type":"text_delta","text":' % self._index
            )
        return out + encode_event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        out = b""
        if self._open is Reasoning:
            out = self._delta("signature_delta", signature=signature_of(self._answer_id, self._index))
        self._open = None
        return out + encode_event("content_block_stop", index=self._index)

    def _delta(self, kind: str, index: int | None = None, **fields: str) -> bytes:
        index = self._index if index is None else index
        return encode_event("content_block_delta", index=index, delta={"type": kind, **fields})
