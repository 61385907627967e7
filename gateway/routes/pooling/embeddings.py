"""``/v1/embeddings``."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.routes.context import read_body, served_model
from gateway.routes.openapi import body_schema, documented
from gateway.routes.pooling.run import PoolCall, answer_json, encode_inputs, usage_of
from gateway.schemas.answers import EmbeddingList
from gateway.schemas.embeddings import EmbeddingRequest
from protos.triptych.v1 import common_pb2 as pb

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
    served = await served_model(request, body.model)
    served.check_serves(pb.POOL_TASK_EMBED)
    call = PoolCall.of(request, served, body)
    is_text = isinstance(body.input[0], str)
    prompt = served.text.prompts.choose(body.prompt_name, body.prompt) if is_text else ""
    inputs = await encode_inputs(call, body, prompt)
    responses = await call.pool(
        inputs,
        pb.POOL_TASK_EMBED,
        param="input",
        use_activation=body.normalize,
        dimensions=body.dimensions,
    )
    return answer_json(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": values}
                for index, values in enumerate(await call.encoded(responses, body.encoding_format))
            ],
            "model": served.model.served_name,
            "usage": usage_of(inputs),
        }
    )
