"""``/v1/models``, and LoRA adapters with vLLM's interface."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, ClassVar, Final, Literal, NotRequired

from fastapi import Depends
from pydantic import Field
from starlette.requests import Request
from typing_extensions import TypedDict

from gateway.auth.middleware import check_admin
from gateway.generation.respond import context_of, find_lora
from gateway.http.openapi import api_router
from gateway.schemas.base import RequestModel, Unserved
from protos.errors import TriptychError, Unavailable
from protos.limits import MAX_NAME_BYTES
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference
from protos.triptych.v1.inference_pb2 import LoraInfo

router = api_router("Models")

ANTHROPIC_VERSION: Final = "anthropic-version"
"""The header of all clients of Anthropic's API."""

_EMBEDDINGS: Final = {pb.POOL_TASK_EMBED, pb.POOL_TASK_TOKEN_EMBED}


class ModelCard(TypedDict):
    """A served model, or a LoRA adapter of it."""

    id: str
    object: Literal["model"]
    created: Annotated[int, Field(description="When the model first became ready, seconds since the epoch.")]
    owned_by: str
    root: Annotated[str, Field(description="Where the model or the adapter was loaded from.")]
    parent: Annotated[str | None, Field(description="An adapter's base model.")]
    max_model_len: Annotated[int, Field(description="Tokens of a prompt and its answer together.")]
    pool_tasks: NotRequired[
        Annotated[
            list[str] | None,
            Field(description="Only for pooling models: what they serve, for example embed."),
        ]
    ]
    embedding_size: NotRequired[Annotated[int | None, Field(description="Only for embedding models.")]]


class ModelDeleted(TypedDict):
    """An unloaded LoRA adapter."""

    id: str
    object: Literal["model"]
    deleted: Literal[True]


class ModelList(TypedDict):
    """The served model and its LoRA adapters."""

    object: Literal["list"]
    data: list[ModelCard]


class AnthropicModelCard(TypedDict):
    """A model in the form of Anthropic's API."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: Annotated[str, Field(description="When the model first became ready.")]
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class AnthropicModelList(TypedDict):
    """Models in the form of Anthropic's API."""

    data: list[AnthropicModelCard]
    first_id: str
    last_id: str
    has_more: Literal[False]


def lora_card(lora: LoraInfo, base: pb.ModelInfo) -> ModelCard:
    """Returns the JSON of a LoRA adapter."""
    return {**_card(base, lora.name), "root": lora.source, "parent": base.served_name}


def _card(model: pb.ModelInfo, name: str) -> ModelCard:
    card: ModelCard = {
        "id": name,
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


@router.get("/v1/models", summary="List models")
async def list_models(request: Request) -> ModelList | AnthropicModelList:
    """Lists the served model and its LoRA adapters.

    Answers 503 until a replica has been ready once. While the scheduler is away, the adapters are missing. A
    request with the header `anthropic-version` gets the list in the form of Anthropic's API.
    """
    context = context_of(request)
    base = context.watcher.served().model
    try:
        loras = await context.client.list_loras()
    except Unavailable:
        loras = ()
    own = [_card(base, name) for name in (base.served_name, *base.aliases)]
    cards = [*own, *(lora_card(lora, base) for lora in loras)]
    if ANTHROPIC_VERSION not in request.headers:
        return {"object": "list", "data": cards}
    return {
        "data": [_anthropic_card(card) for card in cards],
        "first_id": cards[0]["id"],
        "last_id": cards[-1]["id"],
        "has_more": False,
    }


@router.get("/v1/models/{model:path}", summary="Get a model")
async def get_model(request: Request, model: str) -> ModelCard | AnthropicModelCard:
    """Returns the served model, or its LoRA adapter, with that name. Names may contain slashes.

    A request with the header `anthropic-version` gets the model in the form of Anthropic's API.
    """
    served = context_of(request).watcher.served()
    base = served.model
    own = served.has_name(model)
    card = _card(base, model) if own else lora_card(await find_lora(request, model), base)
    return _anthropic_card(card) if ANTHROPIC_VERSION in request.headers else card


def _anthropic_card(card: ModelCard) -> AnthropicModelCard:
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": datetime.fromtimestamp(card["created"], UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": card["max_model_len"],
        "max_tokens": card["max_model_len"],
    }


def _require_admin(request: Request) -> None:
    check_admin(request, context_of(request).keys)


lora_router = api_router("LoRA adapters")
lora_router.dependencies.append(Depends(_require_admin))

# The names of the RPCs' fields in the bodies here.
_PARAMS: Final = {"name": "lora_name", "source": "lora_path"}


class LoadLoraRequest(RequestModel):
    """A LoRA adapter to load."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        "is_3d_lora_weight": Unserved((False,), "adapters of experts' stacked weights are not served"),
    }

    lora_name: str = Field(
        min_length=1, max_length=MAX_NAME_BYTES, description="The name that requests will use."
    )
    lora_path: str = Field(
        min_length=1,
        max_length=4096,
        description="A folder or hub id that the workers can read; an id may end with @revision.",
    )
    load_inplace: bool = Field(
        False,
        description="Whether it may replace an adapter of the same name, whose running requests go on"
        " undisturbed.",
    )


class UnloadLoraRequest(RequestModel):
    """A LoRA adapter to unload."""

    lora_name: str = Field(description="Its name.")


@contextmanager
def _params_of_bodies() -> Iterator[None]:
    """Names the fields of the bodies here in the scheduler's errors."""
    try:
        yield
    except TriptychError as error:
        error.param = _PARAMS.get(error.param or "", error.param)
        raise


@lora_router.post("/v1/load_lora_adapter", summary="Load a LoRA adapter")
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


@lora_router.post("/v1/unload_lora_adapter", summary="Unload a LoRA adapter")
async def unload_lora_adapter(request: Request, body: UnloadLoraRequest) -> ModelDeleted:
    """Frees the name of a LoRA adapter. Its running requests go on to their end.

    Needs a key with admin rights, too.
    """
    with _params_of_bodies():
        await context_of(request).client.unload_lora(body.lora_name)
    return {"id": body.lora_name, "object": "model", "deleted": True}


router.include_router(lora_router)
