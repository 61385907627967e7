"""The bodies of ``/score``, ``/rerank``, ``/classify`` and ``/pooling``, with vLLM's interface.

``PoolingBody`` has what they share with ``/v1/embeddings``.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from gateway.quoting import quote
from gateway.schemas.base import RequestModel, Unserved
from gateway.schemas.completions import as_prompts
from gateway.schemas.sampling import UINT32_MAX, ModelName, or_default

COMMON_UNSERVED: Mapping[str, Unserved] = {
    "messages": Unserved((), "send the text as 'input'"),
    "embed_dtype": Unserved(("float32",), "results are float32"),
    "endianness": Unserved(("native", "little"), "base64 is little-endian"),
}
COMMON_TOLERATED: Mapping[str, str] = {
    "padding": "padding has no effect on results; omit it",
    "request_id": "send it as the header X-Request-Id",
    "cache_salt": "pooling models have no prefix cache; omit it",
}

Inputs = Annotated[
    list[str | list[int]],
    BeforeValidator(as_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    Field(description="One input or several, as text or as token ids."),
]

Dimensions = Annotated[
    int | None,
    Field(
        ge=1,
        le=UINT32_MAX,
        description="Cut embeddings to so many values, if the model was trained for it.",
    ),
]
EncodingFormat = Annotated[
    Literal["float", "base64"],
    or_default("float"),
    Field(description="base64: float32 in little-endian order, as OpenAI's client asks for."),
]

Activation = Annotated[
    bool | None,
    Field(description="Probabilities instead of logits; omitted: as the model's authors do."),
]


def _texts(value: Any) -> list[str]:
    """Returns a list of texts, from a text, a list of them, or Jina's objects with ``text``."""
    values = value if isinstance(value, list) else [value]
    texts: list[Any] = [
        item.get("text") if isinstance(item, dict) and set(item) == {"text"} else item for item in values
    ]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"must be a string or a list of strings, got {quote(value)}")
    if not texts:
        raise ValueError("is empty: it must give at least one text")
    return texts


Texts = Annotated[list[str], BeforeValidator(_texts, json_schema_input_type=str | list[str])]


class PoolingBody(RequestModel):
    """What every request to a pooling model may have."""

    unserved: ClassVar[Mapping[str, Unserved]] = COMMON_UNSERVED
    tolerated: ClassVar[Mapping[str, str]] = COMMON_TOLERATED

    model: Annotated[
        ModelName | None, Field(description="A name from /v1/models; omitted: the served model.")
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        Field(
            ge=-1,
            description="Keep at most so many tokens of each input, special ones included. -1: as many as fit.",
        ),
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"], or_default("right"), Field(description="Where inputs lose tokens.")
    ] = "right"
    priority: Annotated[
        int, or_default(0), Field(ge=-(2**31), le=2**31 - 1, description="Lower values run first.")
    ] = 0
    user: Annotated[str | None, Field(max_length=512, description="Your end user, for the access log.")] = (
        None
    )


class InputBody(PoolingBody):
    """A request with inputs that are read one by one."""

    input: Inputs
    add_special_tokens: Annotated[
        bool | None, Field(description="Add the special tokens that the model expects; true by default.")
    ] = None


# Older names of vLLM's. Ignoring them would change the values.
_RENAMED: Mapping[str, Unserved] = dict.fromkeys(
    ("activation", "softmax", "normalize"), Unserved((), "send 'use_activation'")
)


class ClassificationRequest(InputBody):
    """A request to classify one or more texts."""

    unserved: ClassVar[Mapping[str, Unserved]] = {**COMMON_UNSERVED, **_RENAMED}

    use_activation: Activation = None


class PoolingRequest(InputBody):
    """A request for a model's results as they are."""

    unserved: ClassVar[Mapping[str, Unserved]] = {**COMMON_UNSERVED, **_RENAMED}

    task: Annotated[
        Literal["embed", "classify", "score", "token_embed", "token_classify"] | None,
        Field(description="Must be one that the model serves; omitted: the model's own."),
    ] = None
    encoding_format: EncodingFormat = "float"
    dimensions: Dimensions = None
    use_activation: Activation = None


class _PairBody(PoolingBody):
    """What requests with pairs of texts share."""

    use_activation: Activation = None
    instruction: Annotated[
        str | None,
        Field(
            description="The task, for models whose chat template writes pairs and has a variable 'instruction'."
        ),
    ] = None
    max_tokens_per_query: Annotated[
        int, or_default(0), Field(ge=0, description="Keep at most so many tokens of each query. 0: all.")
    ] = 0
    max_tokens_per_doc: Annotated[
        int, or_default(0), Field(ge=0, description="Keep at most so many tokens of each document. 0: all.")
    ] = 0


class ScoreRequest(_PairBody):
    """A request to score pairs: one text with each of several, or text by text."""

    text_1: Annotated[
        Texts,
        Field(validation_alias=AliasChoices("text_1", "queries", "data_1"), description="One query, or one for each document. Also called queries or data_1."),
    ]  # fmt: skip
    text_2: Annotated[
        Texts,
        Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"), description="The documents. Also called documents, items or data_2."),
    ]  # fmt: skip

    @model_validator(mode="after")
    def _lengths_match(self) -> "ScoreRequest":
        if len(self.text_1) not in (1, len(self.text_2)):
            raise ValueError(
                f"text_1 has {len(self.text_1)} texts and text_2 {len(self.text_2)}; send one in text_1, or as many"
            )
        return self


class RerankRequest(_PairBody):
    """A request to sort documents by how well they answer a query."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        **COMMON_UNSERVED,
        "rank_fields": Unserved((), "send the text of each document"),
    }

    query: Annotated[str, Field(description="The query.")]
    documents: Annotated[Texts, Field(description="Texts, or objects with `text`.")]
    top_n: Annotated[
        int, or_default(0), Field(ge=0, description="Return only so many documents, the best. 0: all.")
    ] = 0
    return_documents: Annotated[
        bool, or_default(True), Field(description="Repeat the documents in the answer.")
    ] = True
