"""``/v1/completions``: its body, its route and its answers."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, ClassVar, Final

import orjson
from pydantic import Field, PlainValidator, model_validator
from starlette.requests import Request
from starlette.responses import Response

from gateway.generation.answer_plan import AnswerPlan
from gateway.generation.generation import Usage
from gateway.generation.request_builder import encode_prompts, truncated
from gateway.generation.respond import context_of, generating_model, respond
from gateway.generation.sequence_text import Delta
from gateway.generation.streaming import AnswerHead, CollectedWriter, ResponseWriter
from gateway.http.openapi import api_router, documented, event_stream
from gateway.openai.answers import Completion, CompletionChunk, CompletionChunks
from gateway.scheduler_client.served_model import ServedModel
from gateway.schemas.base import Unserved
from gateway.schemas.sampling import COMMON_UNSERVED, UINT32_MAX, SamplingRequest, as_prompts
from protos import limits
from protos.errors import InvalidArgument
from protos.limits import MAX_SEQUENCES

# OpenAI's default for this endpoint; chats continue to the end of the context.
DEFAULT_MAX_TOKENS: Final = 16


class CompletionRequest(SamplingRequest):
    """A request to continue prompts."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        **COMMON_UNSERVED,
        "suffix": Unserved(("",), "text after the insertion point is not served"),
        "max_completion_tokens": Unserved((), "it belongs to chats; send 'max_tokens'"),
    }

    prompt: Annotated[
        list[str | list[int]],
        PlainValidator(as_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ] = Field(description="One prompt or several, as text or as token ids.")

    max_tokens: int | None = Field(
        None,
        ge=0,
        le=UINT32_MAX,
        description="Maximum number of new tokens, 16 by default; 0 only with echo.",
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=limits.MAX_LOGPROBS,
        description="Report each token's log-probability, and those of this many of the likeliest tokens.",
    )
    echo: bool = Field(False, description="Repeat the prompt at the beginning of each choice.")

    @model_validator(mode="after")
    def _zero_tokens_need_echo(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens=0 is only allowed together with echo=true; ask for at least 1 token")
        return self

    @property
    def output_limit(self) -> int:
        """Maximum number of new tokens per choice."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else max(1, self.max_tokens)

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report with each new token; ``None``: no log-probabilities."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt's tokens.

        An answer that repeats its prompt reports the prompt's tokens in the same detail as its own.
        """
        asked = [
            count
            for count in (self.prompt_logprobs, self.logprobs if self.echo else None)
            if count is not None
        ]
        return max(asked, default=None)

    @property
    def prompt_only(self) -> bool:
        """Whether the answer consists of the prompt alone."""
        return self.max_tokens == 0


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
    context = context_of(request)
    if context.settings.enable_force_include_usage:
        body = body.with_forced_usage()
    served = await generating_model(request, body.model)
    _check_counts(body, context.settings.max_prompts)
    size, special = len(await request.body()), body.add_special_tokens is not False
    prompts = await encode_prompts(
        served, context.text_worker, body.prompt, special=special, size=size, param="prompt"
    )
    prompts = [truncated(served, body, prompt) for prompt in prompts]

    def prepare() -> tuple[list[str] | None, AnswerPlan]:
        echoes = _echoes(served, body, prompts) if body.echo else None
        return echoes, AnswerPlan(constraint=body.constraint(), constraint_param=body.constraint_param)

    echoes, plan = await context.text_worker.run(size, prepare)
    return await respond(request, body, served, prompts, plan, _writer, id_prefix="cmpl-", echoes=echoes)


def _echoes(served: ServedModel, body: CompletionRequest, prompts: list[list[int]]) -> list[str]:
    # An echo omits the tokens that truncation removed, and those that were added to a text.
    cut = body.truncate_prompt_tokens is not None
    return [
        given
        if isinstance(given, str) and not cut
        else served.text.decode(prompt, skip_special_tokens=body.skip_special_tokens)
        for given, prompt in zip(body.prompt, prompts, strict=True)
    ]


def _check_counts(body: CompletionRequest, max_prompts: int) -> None:
    """Refuses too many prompts or choices."""
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


def _writer(head: AnswerHead) -> ResponseWriter:
    return CompletionChunks(head) if head.body.stream else CollectedWriter(head, partial(_body, head))


def _body(head: AnswerHead, ends: list[Delta], usage: Usage) -> bytes:
    prompts = head.prompt_fields()
    choices = [
        {
            "index": end.sequence,
            "text": end.text,
            "logprobs": head.reporter.completion(end.tokens),
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
            **head.choice_fields(end),
            **prompts[end.sequence // head.body.n],
        }
        for end in ends
    ]
    return orjson.dumps(
        {
            "id": head.answer_id,
            "object": "text_completion",
            "created": head.created,
            "model": head.model,
            "choices": choices,
            "usage": usage.body(),
            "system_fingerprint": head.fingerprint,
        }
    )
