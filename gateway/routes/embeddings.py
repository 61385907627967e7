"""``/v1/embeddings``."""

import array
import base64
import sys
from collections.abc import Sequence

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.responses import while_client_waits
from gateway.http.middleware import note, tenant_of
from gateway.routes.answer import unique_wire_id
from gateway.routes.context import context_of, read_body, served_model
from gateway.routes.openapi import body_schema, documented
from gateway.routes.request_builder import encode_prompts, pool_requests
from gateway.scheduler_link.served_model import ServedModel
from gateway.schemas.answers import EmbeddingList
from gateway.schemas.embeddings import EmbeddingRequest
from protos.errors import InvalidArgument, Unsupported

router = APIRouter(tags=["Embeddings"])


@router.post(
    "/v1/embeddings",
    summary="Embed texts",
    openapi_extra=body_schema(EmbeddingRequest),
    responses=documented(EmbeddingList),
)
async def embeddings(request: Request) -> Response:
    """Returns one embedding for each input text, in the order of the inputs, as OpenAI's endpoint does.

    Only an embedding model serves this route. Inputs may be texts or lists of token ids.
    """
    body = await read_body(request, EmbeddingRequest)
    context = context_of(request)
    served = await served_model(request, body.model)
    served.check_embeds()
    _check(body, served, context.settings.max_inputs)
    special = body.add_special_tokens is not False
    size = len(await request.body())
    prompts = await encode_prompts(
        served, context.text_worker, body.input, special=special, size=size, param="input"
    )
    tenant = tenant_of(request.headers)
    note(request.scope, tenant=tenant or None)
    requests = pool_requests(served, body, prompts, unique_wire_id(request), tenant=tenant)
    responses = await while_client_waits(request.receive, context.client.pool(requests))
    num_tokens = sum(map(len, prompts))
    note(request.scope, prompt_tokens=num_tokens)
    seconds = context.clock() - request.scope["triptych.arrived"]
    for prompt in prompts:
        context.metrics.finished("stop", len(prompt), seconds)
    encode = _base64 if body.encoding_format == "base64" else list
    return Response(
        orjson.dumps(
            {
                "object": "list",
                "data": [
                    {"object": "embedding", "index": index, "embedding": encode(response.values)}
                    for index, response in enumerate(responses)
                ],
                "model": served.model.served_name,
                "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            }
        ),
        media_type="application/json",
    )


def _check(body: EmbeddingRequest, served: ServedModel, max_inputs: int) -> None:
    if len(body.input) > max_inputs:
        raise InvalidArgument(
            f"'input' has {len(body.input)} texts; send at most {max_inputs} at once", param="input"
        )
    size = served.model.pooled_size
    if body.dimensions is not None and body.dimensions != size:
        raise Unsupported(
            f"dimensions={body.dimensions} is not supported: embeddings of '{served.model.served_name}' have"
            f" {size}; omit it",
            param="dimensions",
        )


def _base64(values: Sequence[float]) -> str:
    """Encodes ``values`` as OpenAI's client reads them: float32 in little-endian order."""
    numbers = array.array("f", values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
