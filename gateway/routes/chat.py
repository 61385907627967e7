"""``/v1/chat/completions``."""

from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.context import body_schema, context_of, read_body
from gateway.generation import Delta
from gateway.prompts import encode_chat, truncated
from gateway.routes.answer import Answer, Told, answer
from gateway.schemas.chat import ChatCompletionRequest
from gateway.sse import ChatChunks

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
        add_generation_prompt=body.add_generation_prompt,
        add_special_tokens=bool(body.add_special_tokens),
        variables=body.chat_template_kwargs,
        size=len(await request.body()),
    )
    prompt = truncated(served, body, prompt)
    return await answer(request, Answer("chatcmpl-", ChatChunks, _completion), body, served, [prompt])


def _completion(answer_id: str, created: int, model: str, ends: list[Delta], told: Told) -> bytes:
    choices: list[dict[str, Any]] = [
        {
            "index": end.sequence,
            "message": {"role": "assistant", "content": end.text, "refusal": None},
            "logprobs": told.reporter.chat(end.tokens),
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
        }
        for end in ends
    ]
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
