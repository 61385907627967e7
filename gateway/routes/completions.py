"""``/v1/completions``."""

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.context import body_schema, context_of, read_body
from gateway.generation import Delta, Usage
from gateway.prompts import encode_prompts
from gateway.routes.answer import Answer, answer
from gateway.schemas.completions import CompletionRequest
from gateway.sse import CompletionChunks
from protos.errors import InvalidArgument

router = APIRouter()


@router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
async def completions(request: Request) -> Response:
    """Continues one or more prompts."""
    body = await read_body(request, CompletionRequest)
    context = context_of(request)
    served = context.watcher.served(body.model)
    served.check_generates()
    if len(body.prompt) > context.settings.max_prompts:
        raise InvalidArgument(
            f"'prompt' has {len(body.prompt)} prompts; send at most {context.settings.max_prompts} at once",
            param="prompt",
        )
    prompts = await encode_prompts(
        served,
        context.text_worker,
        body.prompt,
        special=body.add_special_tokens is not False,
        size=len(await request.body()),
        param="prompt",
    )
    return await answer(request, Answer("cmpl-", CompletionChunks, _completion), body, served, prompts)


def _completion(answer_id: str, created: int, model: str, ends: list[Delta], usage: Usage) -> bytes:
    choices = [
        {
            "index": end.sequence,
            "text": end.text,
            "logprobs": None,
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
        }
        for end in ends
    ]
    return orjson.dumps(
        {
            "id": answer_id,
            "object": "text_completion",
            "created": created,
            "model": model,
            "choices": choices,
            "usage": usage.body(),
        }
    )
