"""The body of ``/v1/embeddings``."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from gateway.schemas.base import RequestModel, Unserved
from gateway.schemas.completions import as_prompts
from gateway.schemas.sampling import ModelName, or_default


class EmbeddingRequest(RequestModel):
    """A request for embeddings of one or more texts."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        "truncate_prompt_tokens": Unserved((), "shorten the input before you send it"),
        "messages": Unserved((), "send the text as 'input'"),
        "embed_dtype": Unserved(("float32",), "embeddings are float32"),
        "endianness": Unserved(("native", "little"), "base64 is little-endian"),
        "request_id": Unserved((), "send it as the header X-Request-Id"),
    }

    model: Annotated[
        ModelName | None, Field(description="A name from /v1/models; omitted: the served model.")
    ] = None
    input: Annotated[
        list[str | list[int]],
        BeforeValidator(as_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
        Field(description="One input or several, as text or as token ids."),
    ]
    encoding_format: Annotated[
        Literal["float", "base64"],
        or_default("float"),
        Field(description="base64: float32 in little-endian order, as OpenAI's client asks for."),
    ] = "float"
    dimensions: Annotated[
        int | None, Field(ge=1, description="Must be the model's own number of dimensions.")
    ] = None
    normalize: Annotated[
        bool | None, Field(description="Scale embeddings to length 1; omitted: as the model's authors do.")
    ] = None
    add_special_tokens: Annotated[
        bool | None, Field(description="Add the special tokens that the model expects; true by default.")
    ] = None
    priority: Annotated[
        int, or_default(0), Field(ge=-(2**31), le=2**31 - 1, description="Lower values run first.")
    ] = 0
    user: Annotated[str | None, Field(max_length=512, description="Your end user, for the access log.")] = (
        None
    )
