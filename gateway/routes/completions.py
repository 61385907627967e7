"""``/v1/completions``."""

from collections.abc import Callable
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.generation import Delta
from gateway.answers.sse import CompletionChunks
from gateway.http.context import body_schema, context_of, read_body
from gateway.routes.answer import Answer, Told, answer
from gateway.routes.request_builder import encode_prompts, truncated
from gateway.schemas.completions import CompletionRequest
from gateway.schemas.sampling import MAX_SEQUENCES
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
    if len(body.prompt) * body.n > max(context.settings.max_prompts, MAX_SEQUENCES):
        raise InvalidArgument(
            f"{len(body.prompt)} prompts with n={body.n} make {len(body.prompt) * body.n} choices; ask for at most "
            f"{max(context.settings.max_prompts, MAX_SEQUENCES)} at once",
            param="n",
        )
    prompts = await encode_prompts(
        served,
        context.text_worker,
        body.prompt,
        special=body.add_special_tokens is not False,
        size=len(await request.body()),
        param="prompt",
    )
    prompts = [truncated(served, body, prompt) for prompt in prompts]
    echoes = None
    if body.echo:
        # What was cut off is no part of the prompt; nor are the tokens that were added to a text.
        cut = body.truncate_prompt_tokens is not None
        echoes = [
            given
            if isinstance(given, str) and not cut
            else served.text.decode(prompt, skip_special_tokens=body.skip_special_tokens)
            for given, prompt in zip(body.prompt, prompts, strict=True)
        ]
    shape = Answer(
        "cmpl-",
        _stream,
        _completion,
        constraint=body.constraint(),
        constraint_param=body.constraint_param,
    )
    return await answer(request, shape, body, served, prompts, echoes=echoes)


def _stream(*args: Any, **options: Any) -> tuple[CompletionChunks, Callable[[Delta], bytes]]:
    chunks = CompletionChunks(*args, **options)
    return chunks, chunks.write


def _completion(answer_id: str, created: int, model: str, ends: list[Delta], told: Told) -> bytes:
    choices = [
        {
            "index": end.sequence,
            "text": end.text,
            "logprobs": told.reporter.completion(end.tokens),
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
            **told.of_prompt(end.sequence),
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
            "usage": told.usage.body(),
        }
    )
