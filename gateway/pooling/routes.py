"""``/v1/embeddings``, ``/classify`` and ``/pooling``."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.generation.context import served_model
from gateway.http.openapi import api_router, json_response
from gateway.pooling.call import BYTES, PoolCall, encode_inputs, usage_of
from gateway.pooling.schemas import (
    Classification,
    ClassificationList,
    ClassificationRequest,
    EmbeddingList,
    EmbeddingRequest,
    PoolingList,
    PoolingRequest,
)
from protos.triptych.v1 import common_pb2 as pb

router = api_router("Pooling")


@router.post(
    "/v1/embeddings", summary="Embed texts", response_model=EmbeddingList, responses={200: {"content": BYTES}}
)
async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
    """Returns an embedding for each input, in the order of the inputs, as OpenAI's endpoint does.

    Only an embedding model serves this route. Inputs may be texts, lists of token ids, or a conversation.
    """
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

    def write(results: list[Any]) -> EmbeddingList:
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": values}
                for index, values in enumerate(results)
            ],
            "model": served.model.served_name,
            "usage": usage_of(inputs),
        }

    return await call.answer_encoded(body, inputs, responses, lambda results: json_response(write(results)))


@router.post("/classify", summary="Classify texts")
async def classify(request: Request, body: ClassificationRequest) -> ClassificationList:
    """Returns the probability of each of the model's classes for each input, and the likeliest class."""
    served = await served_model(request, body.model)
    served.check_serves(pb.POOL_TASK_CLASSIFY)
    call = PoolCall.of(request, served, body)
    inputs = await encode_inputs(call, body)
    responses = await call.pool(
        inputs, pb.POOL_TASK_CLASSIFY, param="input", use_activation=body.use_activation
    )
    labels, data = served.model.pooling.labels, list[Classification]()
    for index, response in enumerate(responses):
        values = list(response.values)
        likeliest = values.index(max(values))
        label = labels[likeliest] if likeliest < len(labels) else None
        data.append({"index": index, "label": label, "probs": values, "num_classes": len(values)})
    return {**call.head("classify-", inputs), "data": data}


@router.post(
    "/pooling",
    summary="Get a pooling model's results",
    response_model=PoolingList,
    responses={200: {"content": BYTES}},
)
async def pooling(request: Request, body: PoolingRequest) -> Response:
    """Returns the model's result for each input: a vector, or a vector for each token.

    In base64 and bytes, the rows of a matrix follow one another.
    """
    served = await served_model(request, body.model)
    if body.task is None:
        task = served.check_serves(*served.model.pool_tasks)
    else:
        task = served.check_serves(pb.PoolTask.Value(f"POOL_TASK_{body.task.upper()}"))
    call = PoolCall.of(request, served, body)
    inputs = await encode_inputs(call, body)
    responses = await call.pool(
        inputs, task, param="input", use_activation=body.use_activation, dimensions=body.dimensions
    )

    def write(results: list[Any]) -> PoolingList:
        return {
            **call.head("pooling-", inputs),
            "data": [
                {"index": index, "object": "pooling", "data": values} for index, values in enumerate(results)
            ],
        }

    return await call.answer_encoded(body, inputs, responses, lambda results: json_response(write(results)))
