"""``/v1/chat/completions``."""

from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.answer_plan import AnswerPlan
from gateway.answers.answer_reader import CollectedMessage, finish_reason
from gateway.answers.chat_stream_writer import ChatStreamWriter
from gateway.answers.chunks import ChatChunks, last_error
from gateway.answers.sequence_text import Delta
from gateway.answers.streaming import ResponseWriter
from gateway.routes.answer import AnswerFormat, CollectedExtras, StreamStart, kept_alive, respond_to_chat
from gateway.routes.context import context_of
from gateway.routes.openapi import api_router, documented, event_stream
from gateway.schemas.answers import ChatChunk, ChatCompletion
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
    return start.chunk_writer(body, chunks, write)


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
