"""``/v1/chat/completions``."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.generation.answer_plan import AnswerPlan
from gateway.generation.context import context_of
from gateway.generation.respond import AnswerFormat, CollectedExtras, StreamStart, kept_alive, respond_to_chat
from gateway.generation.sequence_text import Delta
from gateway.generation.streaming import ResponseWriter
from gateway.http.openapi import api_router, documented, event_stream
from gateway.openai.answers import AssistantMessage, ChatChunk, ChatCompletion, ToolCall
from gateway.openai.chunks import ChatChunks, ChatStreamWriter, chunk_writer, finish_reason, last_error
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
    answer = respond_to_chat(request, body, partial(_format, body))
    return await kept_alive(request, answer, last_error, streams=body.stream)


def _format(body: ChatCompletionRequest, plan: AnswerPlan) -> AnswerFormat:
    return AnswerFormat("chatcmpl-", partial(_stream, body, plan), partial(_collected_body, plan))


def _stream(body: ChatCompletionRequest, plan: AnswerPlan, start: StreamStart) -> ResponseWriter:
    chunks = ChatChunks(
        *start[:3],
        with_usage=body.include_usage,
        reporter=start.reporter,
        fingerprint=start.fingerprint,
        prompt_of=start.prompt_of,
    )
    write = chunks.write if plan.plain else ChatStreamWriter(chunks, plan.reader, named=plan.named).write
    return chunk_writer(start, body, chunks, write)


def _choice(plan: AnswerPlan, end: Delta, extras: CollectedExtras) -> dict[str, Any]:
    message, reason = CollectedMessage.of(plan.reader().whole(end.text)), end.finish_reason
    return {
        "index": end.sequence,
        "message": message.body(with_reasoning=plan.thinking is not None),
        "logprobs": extras.reporter.chat(end.tokens),
        "finish_reason": reason and finish_reason(reason, len(message.calls), named=plan.named),
        "stop_reason": end.stop_reason,
        **extras.of_choice(end),
    }


def _collected_body(
    plan: AnswerPlan, answer_id: str, created: int, model: str, ends: list[Delta], extras: CollectedExtras
) -> bytes:
    return orjson.dumps(
        {
            "id": answer_id,
            "object": "chat.completion",
            "created": created,
            "model": model,
            "choices": [_choice(plan, end, extras) for end in ends],
            "usage": extras.usage.body(),
            "service_tier": "default",
            "system_fingerprint": extras.fingerprint,
            **extras.of_prompt(0),
        }
    )


@dataclass(slots=True)
class CollectedMessage:
    """A chat message, collected from events."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, ToolCall] = field(default_factory=dict)

    @classmethod
    def of(cls, events: Iterable[Event]) -> "CollectedMessage":
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
