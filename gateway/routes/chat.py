"""``/v1/chat/completions``."""

from collections.abc import Callable
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.answer_reader import Message, finish_reason
from gateway.answers.chat_stream_writer import ReadStream
from gateway.answers.generation import Delta
from gateway.answers.sse import ChatChunks
from gateway.http.context import body_schema, context_of, read_body
from gateway.routes.answer import Answer, Told, answer
from gateway.routes.request_builder import encode_chat, truncated
from gateway.schemas.chat import ChatCompletionRequest
from gateway.tools.answer_plan import Reading, plan

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatCompletionRequest))
async def chat_completions(request: Request) -> Response:
    """Answers a conversation."""
    body = await read_body(request, ChatCompletionRequest)
    context = context_of(request)
    served = context.watcher.served(body.model)
    served.check_generates()
    prompt = await encode_chat(
        served,
        context.text_worker,
        body.messages,
        tools=body.tools,
        may_call=body.tool_choice != "none",
        add_generation_prompt=body.add_generation_prompt,
        add_special_tokens=bool(body.add_special_tokens),
        variables=body.chat_template_kwargs,
        size=len(await request.body()),
    )
    prompt = truncated(served, body, prompt)
    size = len(await request.body()) if body.tools or body.constrained else 0
    reading = await context.text_worker.run(size, lambda: plan(context.settings, served, body, prompt))
    shape = Answer(
        "chatcmpl-",
        partial(_stream, reading),
        partial(_completion, reading),
        reading.markers,
        reading.constraint,
        reading.constraint_param,
    )
    return await answer(request, shape, body, served, [prompt])


def _stream(reading: Reading, *args: Any, **options: Any) -> tuple[ChatChunks, Callable[[Delta], bytes]]:
    chunks = ChatChunks(*args, **options)
    if reading.plain:
        return chunks, chunks.write
    return chunks, ReadStream(chunks, reading.reader, named=reading.named).write


def _choice(reading: Reading, end: Delta, told: Told) -> dict[str, Any]:
    message, reason = Message.of(reading.reader().whole(end.text)), end.finish_reason
    return {
        "index": end.sequence,
        "message": message.body(with_reasoning=reading.thinking is not None),
        "logprobs": told.reporter.chat(end.tokens),
        "finish_reason": reason and finish_reason(reason, len(message.calls), named=reading.named),
        "stop_reason": end.stop_reason,
    }


def _completion(
    reading: Reading, answer_id: str, created: int, model: str, ends: list[Delta], told: Told
) -> bytes:
    choices = [_choice(reading, end, told) for end in ends]
    return orjson.dumps(
        {
            "id": answer_id,
            "object": "chat.completion",
            "created": created,
            "model": model,
            "choices": choices,
            "usage": told.usage.body(),
            **told.of_prompt(0),
        }
    )
