"""``/v1/models``."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from gateway.http.context import context_of
from protos.triptych.v1 import common_pb2 as pb

router = APIRouter()


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
        card["embedding_size"] = model.pooled_size
    return card


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The served models: one, or an error while none is known."""
    return {"object": "list", "data": [_card(context_of(request).watcher.served().model)]}


@router.get("/v1/models/{model:path}")
async def get_model(request: Request, model: str) -> dict[str, Any]:
    """One model; names may contain slashes."""
    return _card(context_of(request).watcher.served(model).model)
