"""``/v1/completions``."""

from functools import partial

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.chunks import CompletionChunks, last_error
from gateway.answers.sequence_text import Delta
from gateway.answers.streaming import ResponseWriter
from gateway.routes.answer import AnswerFormat, CollectedExtras, StreamStart, kept_alive, respond
from gateway.routes.context import context_of, generating_model
from gateway.routes.openapi import api_router, documented, event_stream
from gateway.routes.request_builder import encode_prompts, truncated
from gateway.schemas.answers import Completion, CompletionChunk
from gateway.schemas.completions import CompletionRequest
from protos.errors import InvalidArgument
from protos.limits import MAX_SEQUENCES

router = api_router("Generation")


@router.post(
    "/v1/completions",
    summary="Continue prompts",
    responses=documented(Completion, content=event_stream(CompletionChunk)),
)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continues one or more prompts, given as text or as token ids, as OpenAI's endpoint does.

    Choices are numbered prompt by prompt: with `n=2`, choices 0 and 1 continue the first prompt. With
    `stream`, the answer arrives as server-sent events that end with `data: [DONE]`.
    """
    if context_of(request).settings.enable_force_include_usage:
        body = body.with_forced_usage()
    return await kept_alive(request, _respond(request, body), last_error, streams=body.stream)


async def _respond(request: Request, body: CompletionRequest) -> Response:
    context = context_of(request)
    served = await generating_model(request, body.model)
    _check_counts(body, context.settings.max_prompts)
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
        # An echo omits the tokens that truncation removed, and those that were added to a text.
        cut = body.truncate_prompt_tokens is not None
        echoes = [
            given
            if isinstance(given, str) and not cut
            else served.text.decode(prompt, skip_special_tokens=body.skip_special_tokens)
            for given, prompt in zip(body.prompt, prompts, strict=True)
        ]
    form = AnswerFormat(
        "cmpl-",
        partial(_stream, body),
        _completion,
        constraint=body.constraint(),
        constraint_param=body.constraint_param,
    )
    return await respond(request, form, body, served, prompts, echoes=echoes)


def _check_counts(body: CompletionRequest, max_prompts: int) -> None:
    """Refuses too many prompts or choices.

    Raises:
        InvalidArgument: naming the limit.
    """
    if len(body.prompt) > max_prompts:
        raise InvalidArgument(
            f"'prompt' has {len(body.prompt)} prompts; send at most {max_prompts} at once", param="prompt"
        )
    max_choices = max(max_prompts, MAX_SEQUENCES)
    if len(body.prompt) * body.n > max_choices:
        raise InvalidArgument(
            f"{len(body.prompt)} prompts with n={body.n} make {len(body.prompt) * body.n} choices; ask for at"
            f" most {max_choices} at once",
            param="n",
        )


def _stream(body: CompletionRequest, start: StreamStart) -> ResponseWriter:
    chunks = CompletionChunks(
        *start[:3],
        with_usage=body.include_usage,
        reporter=start.reporter,
        fingerprint=start.fingerprint,
        prompt_of=start.prompt_of,
    )
    return start.chunk_writer(body, chunks, chunks.write)


def _completion(
    answer_id: str, created: int, model: str, ends: list[Delta], extras: CollectedExtras
) -> bytes:
    choices = [
        {
            "index": end.sequence,
            "text": end.text,
            "logprobs": extras.reporter.completion(end.tokens),
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
            **extras.of_choice(end),
            **extras.of_prompt(end.sequence),
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
            "usage": extras.usage.body(),
            "system_fingerprint": extras.fingerprint,
        }
    )
