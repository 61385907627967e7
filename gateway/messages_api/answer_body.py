"""Anthropic's message object: its blocks, its stop reason and its token counts."""

import hashlib
from collections.abc import Iterable
from typing import Any, Final, Literal, NamedTuple

import orjson

from gateway.answers.generation import Usage
from gateway.answers.sequence_text import Delta
from gateway.messages_api.answers import AnswerBlock, MessageAnswer, MessageHead, TokenCounts
from gateway.parsers.events import CallArguments, CallRevoked, CallStart, Event, Reasoning, Text

ID_PREFIX: Final = "msg_"


class StopReason(NamedTuple):
    """Why an answer ended."""

    reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    sequence: str | None = None
    """The stop sequence, if one ended the answer."""

    @classmethod
    def of(cls, delta: Delta, *, called: bool, complete: bool) -> "StopReason":
        """Returns the reason of a sequence's last delta.

        A stop sequence that cuts a call short wins over the call, which must not run.

        Args:
            delta: the last delta.
            called: whether the answer has calls.
            complete: whether the last call's input is complete.
        """
        if delta.finish_reason == "length":
            return cls("max_tokens")
        if called and complete:
            return cls("tool_use")
        if isinstance(delta.stop_reason, str):
            return cls("stop_sequence", delta.stop_reason)
        return cls("tool_use" if called else "end_turn")


def usage_body(usage: Usage) -> TokenCounts:
    """Returns the token counts. Tokens from the prefix cache are not part of ``input_tokens``.

    No cache entry is created on purpose: every computed prefix is cached, and costs nothing more.
    """
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.thinking_tokens},
    }


def message_head(answer_id: str, model: str) -> MessageHead:
    """Returns the fields that begin a message."""
    return {"id": answer_id, "type": "message", "role": "assistant", "model": model}


def signature_of(answer_id: str, index: int) -> str:
    """Returns what clients send back with a thinking block; it is not verified."""
    return hashlib.blake2b(f"{answer_id}/{index}".encode(), digest_size=32).hexdigest()


def text_block(text: str) -> AnswerBlock:
    """Returns a block of text."""
    return {"type": "text", "text": text}


def thinking_block(thinking: str, signature: str) -> AnswerBlock:
    """Returns a block of thinking."""
    return {"type": "thinking", "thinking": thinking, "signature": signature}


def tool_use_block(call: CallStart, arguments: dict[str, Any]) -> AnswerBlock:
    """Returns a block with a call."""
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def input_of(arguments: str) -> dict[str, Any] | None:
    """Returns the input of a call; ``None`` if its text is incomplete."""
    try:
        found = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def content_of(events: Iterable[Event]) -> list[tuple[Event, str]]:
    """Returns the first event of each block, in order, with the block's text or arguments."""
    blocks: list[tuple[Event, list[str]]] = []
    calls: dict[int, tuple[Event, list[str]]] = {}
    for event in events:
        match event:
            case Text(text) | Reasoning(text):
                if not blocks or type(blocks[-1][0]) is not type(event):
                    blocks.append((event, []))
                blocks[-1][1].append(text)
            case CallStart(number):
                calls[number] = (event, [])
                blocks.append(calls[number])
            case CallArguments(number, fragment):
                calls[number][1].append(fragment)
            case CallRevoked(number, source):
                blocks[blocks.index(calls.pop(number))] = (Text(source), [source])
    return [(event, "".join(pieces)) for event, pieces in blocks]


def message_body(
    answer_id: str, model: str, end: Delta, events: Iterable[Event], usage: Usage, *, omit_thinking: bool
) -> MessageAnswer:
    """Returns the message that a whole answer is.

    Args:
        answer_id: its id.
        model: the model's name, as the client wrote it.
        end: the answer's only delta.
        events: thinking, text and calls in the answer.
        usage: token counts.
        omit_thinking: leave the text of thinking blocks empty.
    """
    content, called, complete = list[AnswerBlock](), False, True
    for index, (event, text) in enumerate(content_of(events)):
        if isinstance(event, Reasoning):
            content.append(thinking_block("" if omit_thinking else text, signature_of(answer_id, index)))
        elif isinstance(event, CallStart):
            arguments = input_of(text)
            called, complete = True, arguments is not None
            content.append(tool_use_block(event, arguments or {}))
        else:
            content.append(text_block(text))
    stop = StopReason.of(end, called=called, complete=complete)
    return {
        **message_head(answer_id, model),
        # An answer without text has an empty block: clients read the first one.
        "content": content or [text_block("")],
        "stop_reason": stop.reason,
        "stop_sequence": stop.sequence,
        "usage": {**usage_body(usage), "service_tier": "standard"},
    }
