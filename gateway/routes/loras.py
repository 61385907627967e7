"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, with vLLM's interface."""

from collections.abc import Mapping
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request

from gateway.keys.guard import check_admin
from gateway.routes.context import context_of, read_body
from gateway.routes.models import lora_card
from gateway.routes.openapi import body_schema, documented
from gateway.schemas.answers import ModelCard, ModelDeleted
from gateway.schemas.loras import LoadLoraRequest, UnloadLoraRequest
from protos.errors import TriptychError
from protos.triptych.v1 import inference_pb2 as inference

router = APIRouter(tags=["LoRA adapters"])

# The names of the RPCs' fields in the bodies here.
_PARAMS: Final = {"name": "lora_name", "source": "lora_path"}


@router.post(
    "/v1/load_lora_adapter",
    summary="Load a LoRA adapter",
    response_model=None,
    openapi_extra=body_schema(LoadLoraRequest),
    responses=documented(ModelCard),
)
async def load_lora_adapter(request: Request) -> dict[str, Any]:
    """Loads a LoRA adapter, which requests can then name as `model`.

    Needs a key with admin rights, such as `--admin-api-key`; if there is none, every request gets 403.
    Answers once all ready workers with room have the adapter.
    """
    context = context_of(request)
    check_admin(request, context.keys)
    body = await read_body(request, LoadLoraRequest)
    message = inference.LoadLoraRequest(
        name=body.lora_name, source=body.lora_path, load_inplace=body.load_inplace
    )
    return await load_adapter(request, message, params=_PARAMS)


async def load_adapter(
    request: Request, message: inference.LoadLoraRequest, *, params: Mapping[str, str]
) -> dict[str, Any]:
    """Loads an adapter and returns its card.

    Args:
        request: the HTTP request.
        message: the adapter.
        params: the client's names of the message's fields, for errors.

    Raises:
        TriptychError: if no model is known yet, or whatever the scheduler answers.
    """
    context = context_of(request)
    base = context.watcher.served().model
    try:
        return lora_card(await context.client.load_lora(message), base)
    except TriptychError as error:
        error.param = params.get(error.param or "", error.param)
        raise


@router.post(
    "/v1/unload_lora_adapter",
    summary="Unload a LoRA adapter",
    response_model=None,
    openapi_extra=body_schema(UnloadLoraRequest),
    responses=documented(ModelDeleted),
)
async def unload_lora_adapter(request: Request) -> dict[str, Any]:
    """Frees the name of a LoRA adapter. Its running requests go on to their end.

    Needs a key with admin rights, too.
    """
    context = context_of(request)
    check_admin(request, context.keys)
    body = await read_body(request, UnloadLoraRequest)
    return await unload_adapter(request, body.lora_name, params=_PARAMS)


async def unload_adapter(request: Request, name: str, *, params: Mapping[str, str]) -> dict[str, Any]:
    """Frees an adapter's name and says so; `params` and errors are those of :func:`load_adapter`."""
    try:
        await context_of(request).client.unload_lora(name)
    except TriptychError as error:
        error.param = params.get(error.param or "", error.param)
        raise
    return {"id": name, "object": "model", "deleted": True}
