"""``/v1/chat/completions``."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.generation.answer_plan import AnswerPlan
from gateway.generation.generation import Usage
from gateway.generation.respond import context_of, respond_to_chat
from gateway.generation.sequence_text import Delta
from gateway.generation.streaming import AnswerHead, CollectedWriter, ResponseWriter
from gateway.http.openapi import api_router, documented, event_stream
from gateway.openai.answers import (
    AssistantMessage,
    ChatChunk,
    ChatChunks,
    ChatCompletion,
    ToolCall,
    finish_reason,
)
from gateway.parsers.events import CallArguments, CallRevoked, CallStart, Event, Reasoning, Text
from gateway.schemas.chat import ChatCompletionRequest

router = api_router("Generation")


@router.post(
    "/v1/chat/completions",
    summary="Answer a conversation",
    responses=documented(ChatCompletion, content=event_stream(ChatChunk)),
)
async def chat_completions(request: Request, body: ChatCompletionRequest) -> Response:
    """Generates the assistant's next message for a conversation, as OpenAI's endpoint does.

    The model's chat template turns the messages into a prompt. With `tools`, the message may contain tool
    calls. With `stream`, the answer arrives as server-sent events that end with `data: [DONE]`.
    """
    if context_of(request).settings.enable_force_include_usage:
        body = body.with_forced_usage()
    return await respond_to_chat(request, body, _writer, id_prefix="chatcmpl-")


def _writer(plan: AnswerPlan, head: AnswerHead) -> ResponseWriter:
    return ChatChunks(head, plan) if head.body.stream else CollectedWriter(head, partial(_body, plan, head))


def _choice(plan: AnswerPlan, head: AnswerHead, end: Delta) -> dict[str, Any]:
    message, reason = CollectedMessage.from_events(plan.reader().whole(end.text)), end.finish_reason
    return {
        "index": end.sequence,
        "message": message.body(with_reasoning=plan.thinking is not None),
        "logprobs": head.reporter.chat(end.tokens),
        "finish_reason": reason and finish_reason(reason, len(message.calls), named=plan.named),
        "stop_reason": end.stop_reason,
        **head.choice_fields(end),
    }


def _body(plan: AnswerPlan, head: AnswerHead, ends: list[Delta], usage: Usage) -> bytes:
    return orjson.dumps(
        {
            "id": head.answer_id,
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "choices": [_choice(plan, head, end) for end in ends],
            "usage": usage.body(),
            "service_tier": "default",
            "system_fingerprint": head.fingerprint,
            **head.prompt_fields()[0],
        }
    )


@dataclass(slots=True)
class CollectedMessage:
    """A chat message, collected from events."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, ToolCall] = field(default_factory=dict)

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> "CollectedMessage":
        """Returns the message that ``events`` add up to."""
        message = cls()
        for event in events:
            match event:
                case Text(text):
                    message.content.append(text)
                case Reasoning(text):
                    message.reasoning.append(text)
                case CallStart(number, id_, name):
                    message.calls[number] = {
                        "id": id_, "type": "function", "function": {"name": name, "arguments": ""},
                    }  # fmt: skip
                case CallArguments(number, fragment):
                    message.calls[number]["function"]["arguments"] += fragment
                case CallRevoked(number, source):
                    del message.calls[number]
                    message.content.append(source)
        return message

    def body(self, *, with_reasoning: bool) -> AssistantMessage:
        """Returns OpenAI's message object. Thinking appears under vLLM's name and under DeepSeek's."""
        content = "".join(self.content)
        body: AssistantMessage = {
            "role": "assistant",
            "content": content if content or not (self.calls or self.reasoning) else None,
            "refusal": None,
        }
        if with_reasoning:
            body["reasoning"] = body["reasoning_content"] = "".join(self.reasoning) or None
        if self.calls:
            body["tool_calls"] = list(self.calls.values())
        return body
