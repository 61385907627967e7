"""``/classify``, and ``/pooling`` for results as they are."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.routes.context import read_body, served_model
from gateway.routes.openapi import body_schema, documented
from gateway.routes.pooling.answers import ClassificationList, PoolingList
from gateway.routes.pooling.run import BYTES, PoolCall, encode_inputs
from gateway.schemas.pooling import ClassificationRequest, PoolingRequest
from protos.triptych.v1 import common_pb2 as pb

router = APIRouter(tags=["Pooling"])


@router.post(
    "/classify",
    summary="Classify texts",
    openapi_extra=body_schema(ClassificationRequest),
    responses=documented(ClassificationList),
)
async def classify(request: Request) -> Response:
    """Returns the probabilities of the model's classes for each input, and the name of the likeliest one."""
    body = await read_body(request, ClassificationRequest)
    served = await served_model(request, body.model)
    served.check_serves(pb.POOL_TASK_CLASSIFY)
    call = PoolCall.of(request, served, body)
    inputs = await encode_inputs(call, body)
    responses = await call.pool(
        inputs, pb.POOL_TASK_CLASSIFY, param="input", use_activation=body.use_activation
    )
    labels, data = served.model.pooling.labels, []
    for index, response in enumerate(responses):
        values = list(response.values)
        likeliest = values.index(max(values))
        label = labels[likeliest] if likeliest < len(labels) else None
        data.append({"index": index, "label": label, "probs": values, "num_classes": len(values)})
    return call.answer("classify-", data, inputs)


@router.post(
    "/pooling",
    summary="Get a pooling model's results",
    openapi_extra=body_schema(PoolingRequest),
    responses=documented(PoolingList, content=BYTES),
)
async def pooling(request: Request) -> Response:
    """Returns what a pooling model computes for each input: one vector, or one for each token.

    base64 and bytes have the rows of a matrix one after the other.
    """
    body = await read_body(request, PoolingRequest)
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

    def write(results: list[Any]) -> Response:
        data = [{"index": index, "object": "pooling", "data": values} for index, values in enumerate(results)]
        return call.answer("pooling-", data, inputs)

    return await call.answer_encoded(body, inputs, responses, write)
