"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, with vLLM's interface."""

import hmac
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request

from gateway.http.errors import Forbidden, Unauthorized
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


def check_admin(request: Request) -> None:
    """Lets only requests with the admin key pass.

    Raises:
        Forbidden: if the gateway has no admin key.
        Unauthorized: if the request has another one, or none.
    """
    key = context_of(request).settings.admin_api_key
    if key is None:
        raise Forbidden("adapters cannot be changed over HTTP here; start the gateway with --admin-api-key")
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Headers are decoded as latin-1, whatever their bytes are.
    matches = hmac.compare_digest(given.strip().encode("latin-1"), key.get_secret_value().encode())
    if scheme.lower() != "bearer" or not matches:
        raise Unauthorized("the admin key is missing or wrong; send 'Authorization: Bearer' with the key")


@router.post(
    "/v1/load_lora_adapter",
    summary="Load a LoRA adapter",
    response_model=None,
    openapi_extra=body_schema(LoadLoraRequest),
    responses=documented(ModelCard),
)
async def load_lora_adapter(request: Request) -> dict[str, Any]:
    """Loads a LoRA adapter, which requests can then name as `model`.

    Needs the gateway's `--admin-api-key` as bearer token; without that setting, every request gets 403.
    Answers once all ready workers with room have the adapter.
    """
    check_admin(request)
    body = await read_body(request, LoadLoraRequest)
    context = context_of(request)
    base = context.watcher.served().model
    message = inference.LoadLoraRequest(
        name=body.lora_name, source=body.lora_path, load_inplace=body.load_inplace
    )
    try:
        return lora_card(await context.client.load_lora(message), base)
    except TriptychError as error:
        error.param = _PARAMS.get(error.param, error.param)
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

    Needs the gateway's `--admin-api-key`, too.
    """
    check_admin(request)
    body = await read_body(request, UnloadLoraRequest)
    try:
        await context_of(request).client.unload_lora(body.lora_name)
    except TriptychError as error:
        error.param = _PARAMS.get(error.param, error.param)
        raise
    return {"id": body.lora_name, "object": "model", "deleted": True}
