"""The answers of the routes for operators, as the OpenAPI document describes them."""

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from gateway.schemas.answers import AnswerModel


class ServerLoad(AnswerModel):
    """How busy this gateway is."""

    server_load: Annotated[int, Field(description="HTTP requests under way.")]


class ServedModelInfo(AnswerModel):
    """The model that is served."""

    names: Annotated[list[str], Field(description="The names that requests can use.")]
    source: Annotated[str, Field(description="Its Hugging Face id or folder.")]
    architecture: str
    dtype: str
    max_model_len: Annotated[int, Field(description="The longest sequence, tokens.")]
    system_fingerprint: str


class ServerInfo(AnswerModel):
    """What runs here."""

    settings: Annotated[dict[str, Any], Field(description="The gateway's settings; secrets are masked.")]
    versions: Annotated[dict[str, str], Field(description="Of Triptych, Python and the packages.")]
    model: Annotated[ServedModelInfo | None, Field(description="The model; null while none is known.")]


class TokenizerInfo(AnswerModel):
    """The model's tokenizer_config.json, special tokens as text, and further fields."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str | None
    chat_template: Annotated[str | None, Field(description="The template that is used.")]


class Sleeps(AnswerModel):
    """Whether replicas have given their memory back."""

    is_sleeping: Annotated[bool, Field(description="Always false.")]


class Pauses(AnswerModel):
    """Whether generation is paused."""

    is_paused: Annotated[bool, Field(description="Always false.")]


class CacheReset(AnswerModel):
    """The outcome of a reset."""

    success: Annotated[bool, Field(description="Always true: failures have an error status.")]
