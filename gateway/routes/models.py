"""``/v1/models``."""

from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request

from gateway.routes.context import context_of
from gateway.routes.openapi import documented
from gateway.schemas.answers import ModelCard, ModelList
from protos.triptych.v1 import common_pb2 as pb

router = APIRouter(tags=["Models"])

_EMBEDDINGS: Final = {pb.POOL_TASK_EMBED, pb.POOL_TASK_TOKEN_EMBED}


def _card(model: pb.ModelInfo) -> dict[str, Any]:
    card: dict[str, Any] = {
        "id": model.served_name,
        "object": "model",
        "created": model.created_unix_s,
        "owned_by": "triptych",
        "root": model.source,
        "parent": None,
        "max_model_len": model.max_model_len,
    }
    if model.pool_tasks:
        card["pool_tasks"] = [
            pb.PoolTask.Name(task).removeprefix("POOL_TASK_").lower() for task in model.pool_tasks
        ]
    if not _EMBEDDINGS.isdisjoint(model.pool_tasks):
        card["embedding_size"] = model.pooled_size
    return card


@router.get("/v1/models", summary="List models", response_model=None, responses=documented(ModelList))
async def list_models(request: Request) -> dict[str, Any]:
    """Lists the served model.

    Answers 503 until a replica has been ready once.
    """
    return {"object": "list", "data": [_card(context_of(request).watcher.served().model)]}


@router.get(
    "/v1/models/{model:path}", summary="Get a model", response_model=None, responses=documented(ModelCard)
)
async def get_model(request: Request, model: str) -> dict[str, Any]:
    """Returns the served model if `model` is its name. Names may contain slashes."""
    return _card(context_of(request).watcher.served(model).model)
