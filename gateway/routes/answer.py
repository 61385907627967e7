"""The common second half of both completions endpoints: submit, then stream or collect."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from gateway.context import context_of, note
from gateway.generation import Delta, Generation, Usage
from gateway.middleware import tenant_of
from gateway.prompts import generate_requests
from gateway.responses import EventStream, collect
from gateway.schemas.sampling import SamplingRequest
from gateway.served_model import Served
from gateway.sse import Chunks
from gateway.submission import MAX_REQUEST_ID
from protos.triptych.v1 import common_pb2 as pb

# Hexadecimal digits that make a client's request id unique among its retries.
_UNIQUE_DIGITS = 8


class Answer(NamedTuple):
    """How one endpoint's answers look."""

    id_prefix: str
    chunks: Callable[..., Chunks]
    # Encodes a collected answer: id, created, model, each sequence's whole text, usage.
    body: Callable[[str, int, str, list[Delta], Usage], bytes]
    # Special tokens that are text for it; None: all.
    markers: frozenset[str] | None = frozenset()
    # What the output must match whatever the request's body says.
    constraint: pb.StructuredOutput | None = None


async def answer(
    request: Request, shape: Answer, body: SamplingRequest, served: Served, prompts: Sequence[Sequence[int]]
) -> Response:
    """Runs ``prompts`` and answers as ``body`` asks.

    Raises:
        InvalidArgument: if its X-Tenant header cannot be used.
        TriptychError: if the request is refused or fails before the first byte of the answer.
    """
    context = context_of(request)
    tenant = tenant_of(request.headers)
    note(request.scope, tenant=tenant or None)
    answer_id = shape.id_prefix + context.new_id()
    wire_id = unique_wire_id(request)
    requests = generate_requests(served, body, prompts, wire_id, tenant=tenant)
    if shape.constraint is not None:
        for one in requests:
            one.sampling.structured_output.CopyFrom(shape.constraint)
    generation = Generation.begin(
        context.client,
        served,
        body,
        requests,
        metrics=context.metrics,
        clock=context.clock,
        arrived=request.scope["triptych.arrived"],
        markers=shape.markers,
    )
    created, model = int(context.wall_clock()), served.model.served_name
    if body.stream:
        chunks = shape.chunks(answer_id, created, model, with_usage=body.include_usage)
        return EventStream(
            generation, chunks, include_usage=body.include_usage, continuous_usage=body.continuous_usage
        )
    ends = await collect(generation, request.scope, request.receive)
    return Response(
        shape.body(answer_id, created, model, ends, generation.usage), media_type="application/json"
    )


def unique_wire_id(request: Request) -> str:
    """The request's id made unique among a client's retries, with room for a prompt's index."""
    given: str = request.scope["triptych.request_id"]
    return f"{given[: MAX_REQUEST_ID - _UNIQUE_DIGITS - 8]}-{context_of(request).new_id()[:_UNIQUE_DIGITS]}"
