"""The common second half of both completions endpoints: submit, then stream or collect."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.generation import Clockwork, Delta, Generation, Usage
from gateway.answers.logprobs import Reporter
from gateway.answers.responses import EventStream, collect
from gateway.answers.sse import Chunks
from gateway.http.context import context_of, note
from gateway.http.middleware import tenant_of
from gateway.routes.request_builder import bad_word_tokens, generate_requests
from gateway.scheduler_link.pending_request import MAX_REQUEST_ID
from gateway.scheduler_link.served_model import Served
from gateway.schemas.sampling import SamplingRequest
from protos.triptych.v1 import common_pb2 as pb

# Hexadecimal digits that make a client's request id unique among its retries.
_UNIQUE_DIGITS = 8


class Told(NamedTuple):
    """What a collected answer tells beside its texts."""

    usage: Usage
    reporter: Reporter
    # For each prompt, if they were asked for.
    prompt_logprobs: list[list[dict[str, Any] | None]] | None
    # Choices a prompt.
    n: int

    def of_prompt(self, sequence: int) -> dict[str, Any]:
        """The fields about the prompt of one of the sequences."""
        if self.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": self.prompt_logprobs[sequence // self.n]}


class Answer(NamedTuple):
    """How one endpoint's answers look."""

    id_prefix: str
    # Makes the encoder of a streamed answer, and what writes each delta with it.
    stream: Callable[..., tuple[Chunks, Callable[[Delta], bytes]]]
    # Encodes a collected answer: id, created, model, each sequence's whole text, and what else there is to tell.
    body: Callable[[str, int, str, list[Delta], Told], bytes]
    # Special tokens that are text for it; None: all.
    markers: frozenset[str] | None = frozenset()
    # What the output must match, and the parameter that says so.
    constraint: pb.StructuredOutput | None = None
    constraint_param: str = ""


async def answer(
    request: Request,
    shape: Answer,
    body: SamplingRequest,
    served: Served,
    prompts: Sequence[Sequence[int]],
    *,
    echoes: Sequence[str] | None = None,
) -> Response:
    """Runs ``prompts`` and answers as ``body`` asks; each answer begins with its prompt's text of ``echoes`` if given.

    Raises:
        Unavailable: if there is no scheduler.
        InvalidArgument: if its X-Tenant header cannot be used.
        TriptychError: if the request is refused or fails before the first byte of the answer.
    """
    context = context_of(request)
    tenant = tenant_of(request.headers)
    note(request.scope, tenant=tenant or None)
    answer_id = shape.id_prefix + context.new_id()
    wire_id = unique_wire_id(request)
    bad_words = await context.text_worker.run(
        sum(map(len, body.bad_words)), lambda: bad_word_tokens(served.text, body.bad_words)
    )
    requests = generate_requests(
        served, body, prompts, wire_id, tenant=tenant, bad_words=bad_words, constraint=shape.constraint
    )
    generation = Generation.begin(
        context.client.submit(requests),
        body,
        served,
        context.text_worker,
        Clockwork(context.metrics, context.clock, request.scope["triptych.arrived"]),
        echoes=echoes,
        markers=shape.markers,
        constraint_param=shape.constraint_param,
    )
    created, model = int(context.wall_clock()), served.model.served_name
    reporter = Reporter(
        served.text.detokenizers.token_bytes,
        as_ids=body.return_tokens_as_token_ids,
        wanted=body.num_logprobs is not None,
    )
    if body.stream:
        chunks, write = shape.stream(
            answer_id, created, model, with_usage=body.include_usage, reporter=reporter
        )
        return EventStream(
            generation,
            chunks,
            write,
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
        )
    ends = await collect(generation, request.scope, request.receive)

    def written() -> bytes:
        told = Told(generation.usage, reporter, _prompt_logprobs(body, generation, reporter), body.n)
        return shape.body(answer_id, created, model, ends, told)

    content = await context.text_worker.run(_effort(body, generation, ends), written)
    return Response(content, media_type="application/json")


def _prompt_logprobs(
    body: SamplingRequest, generation: Generation, reporter: Reporter
) -> list[list[dict[str, Any] | None]] | None:
    count = body.prompt_logprobs
    if count is None:
        return None
    return [reporter.prompt(one.token_ids, one.logprobs, count) for one in generation.prompts]


def _effort(body: SamplingRequest, generation: Generation, ends: Sequence[Delta]) -> int:
    """Of reading and writing a collected answer: letters, and log-probabilities."""
    letters = sum(len(end.text) for end in ends)
    reported = sum(len(end.tokens) for end in ends) * (1 + (body.num_logprobs or 0))
    if body.prompt_logprobs is None:
        return letters + reported
    prompts = sum(len(one.token_ids) for one in generation.prompts)
    return letters + reported + prompts * (1 + body.prompt_logprobs)


def unique_wire_id(request: Request) -> str:
    """The request's id made unique among a client's retries, with room for a prompt's index."""
    given: str = request.scope["triptych.request_id"]
    return f"{given[: MAX_REQUEST_ID - _UNIQUE_DIGITS - 8]}-{context_of(request).new_id()[:_UNIQUE_DIGITS]}"
