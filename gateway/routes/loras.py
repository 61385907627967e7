"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, with vLLM's interface."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, ClassVar, Final

from fastapi import Depends
from pydantic import Field
from starlette.requests import Request

from gateway.auth.middleware import check_admin
from gateway.routes.context import context_of
from gateway.routes.models import ModelCard, ModelDeleted, lora_card
from gateway.routes.openapi import api_router
from gateway.schemas.base import RequestModel, Unserved
from gateway.schemas.sampling import or_default
from protos.errors import TriptychError
from protos.limits import MAX_NAME_BYTES
from protos.triptych.v1 import inference_pb2 as inference


def _require_admin(request: Request) -> None:
    check_admin(request, context_of(request).keys)


router = api_router("LoRA adapters")
router.dependencies.append(Depends(_require_admin))

# The names of the RPCs' fields in the bodies here.
_PARAMS: Final = {"name": "lora_name", "source": "lora_path"}


class LoadLoraRequest(RequestModel):
    """A LoRA adapter to load."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        "is_3d_lora_weight": Unserved((False,), "adapters of experts' stacked weights are not served"),
    }

    lora_name: Annotated[
        str, Field(min_length=1, max_length=MAX_NAME_BYTES, description="The name that requests will use.")
    ]
    lora_path: Annotated[
        str,
        Field(
            min_length=1,
            max_length=4096,
            description="A folder or hub id that the workers can read; an id may end with @revision.",
        ),
    ]
    load_inplace: Annotated[
        bool,
        or_default(False),
        Field(
            description="Whether it may replace an adapter of the same name, whose running requests go on"
            " undisturbed."
        ),
    ] = False


class UnloadLoraRequest(RequestModel):
    """A LoRA adapter to unload."""

    lora_name: Annotated[str, Field(description="Its name.")]


@contextmanager
def _params_of_bodies() -> Iterator[None]:
    """Names the fields of the bodies here in the scheduler's errors."""
    try:
        yield
    except TriptychError as error:
        error.param = _PARAMS.get(error.param or "", error.param)
        raise


@router.post("/v1/load_lora_adapter", summary="Load a LoRA adapter")
async def load_lora_adapter(request: Request, body: LoadLoraRequest) -> ModelCard:
    """Loads a LoRA adapter, which requests can then name as `model`.

    Needs a key with admin rights, such as `--admin-api-key`; if there is none, every request gets 403.
    Answers once the adapter is on all ready workers with room.
    """
    context = context_of(request)
    base = context.watcher.served().model
    message = inference.LoadLoraRequest(
        name=body.lora_name, source=body.lora_path, load_inplace=body.load_inplace
    )
    with _params_of_bodies():
        return lora_card(await context.client.load_lora(message), base)


@router.post("/v1/unload_lora_adapter", summary="Unload a LoRA adapter")
async def unload_lora_adapter(request: Request, body: UnloadLoraRequest) -> ModelDeleted:
    """Frees the name of a LoRA adapter. Its running requests go on to their end.

    Needs a key with admin rights, too.
    """
    with _params_of_bodies():
        await context_of(request).client.unload_lora(body.lora_name)
    return {"id": body.lora_name, "object": "model", "deleted": True}
