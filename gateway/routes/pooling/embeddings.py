"""``/v1/embeddings``."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.routes.context import read_body, served_model
from gateway.routes.openapi import body_schema, documented
from gateway.routes.pooling.answers import EmbeddingList
from gateway.routes.pooling.run import BYTES, PoolCall, answer_json, encode_inputs, usage_of
from gateway.schemas.embeddings import EmbeddingRequest
from protos.triptych.v1 import common_pb2 as pb

router = APIRouter(tags=["Embeddings"])


@router.post(
    "/v1/embeddings",
    summary="Embed texts",
    openapi_extra=body_schema(EmbeddingRequest),
    responses=documented(EmbeddingList, content=BYTES),
)
async def embeddings(request: Request) -> Response:
    """Returns one embedding for each input text, in the order of the inputs, as OpenAI's endpoint does.

    Only an embedding model serves this route. Inputs may be texts, lists of token ids, or one conversation.
    """
    body = await read_body(request, EmbeddingRequest)
    served = await served_model(request, body.model)
    served.check_serves(pb.POOL_TASK_EMBED)
    call = PoolCall.of(request, served, body)
    is_text = bool(body.input) and isinstance(body.input[0], str)
    prompt = served.text.prompts.choose(body.prompt_name, body.prompt) if is_text else ""
    inputs = await encode_inputs(call, body, prompt)
    responses = await call.pool(
        inputs,
        pb.POOL_TASK_EMBED,
        param="input",
        use_activation=body.use_activation,
        dimensions=body.dimensions,
    )

    def write(results: list[Any]) -> Response:
        return answer_json(
            {
                "object": "list",
                "data": [
                    {"object": "embedding", "index": index, "embedding": values}
                    for index, values in enumerate(results)
                ],
                "model": served.model.served_name,
                "usage": usage_of(inputs),
            }
        )

    return await call.answer_encoded(body, inputs, responses, write)
