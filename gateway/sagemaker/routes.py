"""The routes of SageMaker's hosting contract, as vLLM has them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Final

import orjson
from fastapi import APIRouter
from pydantic import Field, RootModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from gateway.answers.chunks import last_error
from gateway.keys.guard import check_admin
from gateway.routes import chat, completions
from gateway.routes.answer import kept_alive
from gateway.routes.context import context_of, read_body, served_model
from gateway.routes.loras import load_adapter, unload_adapter
from gateway.routes.openapi import body_schema, documented
from gateway.routes.pooling import classification, embeddings, scoring
from gateway.routes.pooling.answers import (
    ClassificationList,
    EmbeddingList,
    PoolingList,
    RerankAnswer,
    ScoreList,
)
from gateway.schemas.answers import ChatCompletion, Completion, ModelCard, ModelDeleted
from gateway.schemas.base import RequestModel
from gateway.schemas.loras import LoadInplace, LoraName, LoraPath
from protos.errors import InvalidArgument
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference

router = APIRouter(tags=["SageMaker"])

_ADAPTER_HEADER: Final = "x-amzn-sagemaker-adapter-identifier"

_Route = Callable[[Request], Awaitable[Response]]


class InvocationAnswer(
    RootModel[
        ChatCompletion
        | Completion
        | EmbeddingList
        | ClassificationList
        | PoolingList
        | RerankAnswer
        | ScoreList
    ]
):
    """The answer of the route that the body belongs to."""


class InvocationRequest(RequestModel):
    """What says which route a body belongs to. The body may have all other parameters of that route."""

    messages: Annotated[Any, Field(description="For /v1/chat/completions, or as input.")] = None
    prompt: Annotated[Any, Field(description="For /v1/completions.")] = None
    input: Annotated[Any, Field(description="For /v1/embeddings, /classify or /pooling.")] = None
    query: Annotated[Any, Field(description="For /rerank.")] = None
    text_1: Annotated[Any, Field(description="For /score. Also called queries or data_1.")] = None


# The names of the first text of a pair.
_FIRST_TEXTS: Final = ("text_1", "queries", "data_1")


@router.post(
    "/invocations",
    summary="Run a request of any kind, for SageMaker",
    openapi_extra=body_schema(InvocationRequest),
    responses=documented(InvocationAnswer),
)
async def invocations(request: Request) -> Response:
    """Answers as the route does that the body belongs to; see there for its parameters.

    A model that generates takes the bodies of /v1/chat/completions and /v1/completions. Pooling models take
    those of /v1/embeddings, /classify, /rerank, /score and /pooling, as far as they serve these routes. The
    header X-Amzn-SageMaker-Adapter-Identifier names a LoRA adapter in place of `model`.
    """
    raw = await request.body()
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        body = None
    if not isinstance(body, dict):
        return await chat.chat_completions(request)  # which says what is wrong
    answer = _answer(request, body)
    return await kept_alive(request, answer, last_error, streams=body.get("stream") is True)


async def _answer(request: Request, body: Mapping[str, Any]) -> Response:
    """Answers a body once a model is known, which says what answers it."""
    served = await served_model(request, None)
    route = _route_of(body, served.model.pool_tasks)
    adapter = request.headers.get(_ADAPTER_HEADER)
    if adapter is not None:
        request = _with_body(request, orjson.dumps({**body, "model": adapter}))
    return await route(request)


def _route_of(body: Mapping[str, Any], tasks: Sequence[int]) -> _Route:
    """Returns what answers a body.

    Raises:
        InvalidArgument: if the model serves no route with such a body.
    """
    if not tasks:
        if "messages" in body:
            return chat.chat_completions
        if "prompt" in body:
            return completions.completions
        raise InvalidArgument(
            "/invocations takes the body of /v1/chat/completions or /v1/completions; send 'messages' or 'prompt'"
        )
    if "query" in body:
        return scoring.rerank
    if any(name in body for name in _FIRST_TEXTS):
        return scoring.score
    if "input" not in body and "messages" not in body:
        raise InvalidArgument(
            "/invocations takes the body of /v1/embeddings, /classify, /pooling, /rerank or /score; send 'input',"
            " 'query' or 'text_1'"
        )
    if pb.POOL_TASK_EMBED in tasks:
        return embeddings.embeddings
    return classification.classify if pb.POOL_TASK_CLASSIFY in tasks else classification.pooling


def _with_body(request: Request, body: bytes) -> Request:
    """Returns the same request with another body."""
    begun = False

    async def receive() -> Message:
        nonlocal begun
        if begun:
            return await request.receive()
        begun = True
        return {"type": "http.request", "body": body, "more_body": False}

    return Request(request.scope, receive)


class AdapterRequest(RequestModel):
    """A LoRA adapter to load."""

    name: LoraName
    src: LoraPath
    load_inplace: LoadInplace = False


@router.post(
    "/adapters",
    summary="Load a LoRA adapter, for SageMaker",
    response_model=None,
    openapi_extra=body_schema(AdapterRequest),
    responses=documented(ModelCard),
)
async def add_adapter(request: Request) -> dict[str, Any]:
    """Loads a LoRA adapter as `/v1/load_lora_adapter` does, with SageMaker's names. Needs admin rights."""
    check_admin(request, context_of(request).keys)
    body = await read_body(request, AdapterRequest)
    message = inference.LoadLoraRequest(name=body.name, source=body.src, load_inplace=body.load_inplace)
    return await load_adapter(request, message, params={"source": "src"})


@router.delete(
    "/adapters/{adapter_name:path}",
    summary="Unload a LoRA adapter, for SageMaker",
    response_model=None,
    responses=documented(ModelDeleted),
)
async def remove_adapter(request: Request, adapter_name: str) -> dict[str, Any]:
    """Unloads a LoRA adapter as `/v1/unload_lora_adapter` does. Needs admin rights."""
    check_admin(request, context_of(request).keys)
    return await unload_adapter(request, adapter_name, params={})
