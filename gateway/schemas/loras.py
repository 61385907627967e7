"""Bodies of the requests that load and unload LoRA adapters."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from gateway.schemas.base import RequestModel, Unserved
from gateway.schemas.sampling import or_default
from protos.limits import MAX_NAME_BYTES

LoraName = Annotated[
    str, Field(min_length=1, max_length=MAX_NAME_BYTES, description="The name that requests will use.")
]

LoraPath = Annotated[
    str,
    Field(
        min_length=1,
        max_length=4096,
        description="A folder or hub id that the workers can read; an id may end with @revision.",
    ),
]

LoadInplace = Annotated[
    bool,
    or_default(False),
    Field(
        description="Whether it may replace an adapter of the same name, whose running requests go on"
        " undisturbed."
    ),
]


class LoadLoraRequest(RequestModel):
    """A LoRA adapter to load."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        "is_3d_lora_weight": Unserved((False,), "adapters of experts' stacked weights are not served"),
    }

    lora_name: LoraName
    lora_path: LoraPath
    load_inplace: LoadInplace = False


class UnloadLoraRequest(RequestModel):
    """A LoRA adapter to unload."""

    lora_name: Annotated[str, Field(description="Its name.")]
