"""The bodies of requests to pooling models, with vLLM's interface, and their answers."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import AliasChoices, ConfigDict, Field, PlainValidator, ValidationInfo, model_validator
from typing_extensions import TypedDict

from gateway.schemas.base import RequestModel, Unserved, ignore, quote
from gateway.schemas.chat import TEMPLATE_UNSERVED, Messages, TemplateInput
from gateway.schemas.sampling import UINT32_MAX, ModelName, as_prompts


def _inputs(value: Any, info: ValidationInfo) -> list[str | list[int]]:
    if value is not None:
        return as_prompts(value)
    if info.data.get("messages") is None:
        raise ValueError("is required: send it, or 'messages'")
    return []


Inputs = Annotated[
    list[str | list[int]],
    PlainValidator(_inputs, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    Field(description="One input or several, as text or as token ids.", validate_default=True),
]

Dimensions = Annotated[
    int | None,
    Field(
        ge=1,
        le=UINT32_MAX,
        description="Cut embeddings to so many values, if the model was trained for it.",
    ),
]

Activation = Annotated[
    bool | None,
    Field(description="Probabilities instead of logits; omitted: as the model's authors do."),
]


def _text_of(item: Any, info: ValidationInfo) -> Any:
    if not isinstance(item, dict) or not isinstance(item.get("text"), str):
        return item
    for name in item:
        if name != "text":
            ignore(info, str(name))
    return item["text"]


def _texts(value: Any, info: ValidationInfo) -> list[str]:
    values = value if isinstance(value, list) else [value]
    texts = [_text_of(item, info) for item in values]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"must be a string or a list of strings, got {quote(value)}")
    if not texts:
        raise ValueError("is empty: it must give at least one text")
    return texts


_TextOrObject = str | dict[str, str]

Texts = Annotated[
    list[str], PlainValidator(_texts, json_schema_input_type=_TextOrObject | list[_TextOrObject])
]


class PoolingBody(RequestModel):
    """The fields of all requests to pooling models."""

    model: ModelName = Field(None, description="A name from /v1/models; omitted: the served model.")
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        description="Keep at most so many tokens of each input, special ones included. -1: as many as fit.",
    )
    truncation_side: Literal["left", "right"] = Field("right", description="Where inputs lose tokens.")
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1, description="Lower values run first.")
    user: str | None = Field(None, max_length=512, description="Your end user, for the access log.")


# Fields of chats other than messages.
_NOT_READ: Mapping[str, Unserved] = {
    **TEMPLATE_UNSERVED,
    **{
        name: Unserved(neutral, "pooling models read messages alone; omit it")
        for name, neutral in (("tools", ([],)), ("documents", ([],)), ("reasoning_effort", ()))
    },
}


class InputBody(TemplateInput, PoolingBody):
    """A request with separate inputs, or with a conversation."""

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [{"required": ["input"]}, {"required": ["messages"]}]}
    )
    unserved: ClassVar[Mapping[str, Unserved]] = _NOT_READ

    messages: Messages | None = Field(
        None, description="One conversation instead of input, for the model's chat template."
    )
    # Behind messages, because its validator looks at them.
    input: Inputs = None  # type: ignore[assignment]
    add_generation_prompt: bool = Field(
        False, description="End a conversation with the header of the assistant's turn."
    )
    add_special_tokens: bool | None = Field(
        None, description="Add the model's special tokens; by default to texts, not to conversations."
    )

    @model_validator(mode="after")
    def _one_kind_of_input(self) -> "InputBody":
        if self.input and self.messages is not None:
            raise ValueError("input and messages exclude each other; send one of them")
        return self


class EncodedBody(InputBody):
    """A request with a choice of the form of its results."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] = Field(
        "float",
        description="base64: the bytes of all numbers, as OpenAI's client asks for. bytes: all results one after"
        " the other as the body, described in the header `metadata`; bytes_only: without that header.",
    )
    embed_dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] = Field(
        "float32", description="The type of numbers in base64 and bytes."
    )
    endianness: Literal["native", "big", "little"] = Field(
        "native", description="The order of bytes in base64 and bytes; native is little."
    )
    dimensions: Dimensions = None


# Older names of vLLM's. Ignoring them would change the values.
_RENAMED: Mapping[str, Unserved] = dict.fromkeys(
    ("activation", "softmax", "normalize"), Unserved((), "send 'use_activation'")
)


class ClassificationRequest(InputBody):
    """A request to classify texts."""

    unserved: ClassVar[Mapping[str, Unserved]] = {**_NOT_READ, **_RENAMED}

    use_activation: Activation = None


class PoolingRequest(EncodedBody):
    """A request for a model's results as they are."""

    unserved: ClassVar[Mapping[str, Unserved]] = {**_NOT_READ, **_RENAMED}

    task: Literal["embed", "classify", "score", "token_embed", "token_classify"] | None = Field(
        None, description="Must be one that the model serves; omitted: the model's own."
    )
    use_activation: Activation = None


class _PairBody(PoolingBody):
    """The common fields of requests with pairs of texts."""

    unserved: ClassVar[Mapping[str, Unserved]] = TEMPLATE_UNSERVED

    use_activation: Activation = None
    instruction: str | None = Field(
        None,
        description="The task, for models whose chat template writes pairs and has a variable 'instruction'.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Further variables for a chat template that writes pairs."
    )
    max_tokens_per_query: int = Field(
        0, ge=0, description="Keep at most so many tokens of each query. 0: all."
    )
    max_tokens_per_doc: int = Field(
        0, ge=0, description="Keep at most so many tokens of each document. 0: all."
    )


class ScoreRequest(_PairBody):
    """A request to score pairs: a text with each of several, or text by text."""

    text_1: Texts = Field(
        validation_alias=AliasChoices("text_1", "queries", "data_1"),
        description="One query, or one for each document. Also called queries or data_1.",
    )
    text_2: Texts = Field(
        validation_alias=AliasChoices("text_2", "documents", "items", "data_2"),
        description="The documents. Also called documents, items or data_2.",
    )

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
        **TEMPLATE_UNSERVED,
        "rank_fields": Unserved((["text"],), "send the text of each document"),
    }
    query: str = Field(description="The query.")
    documents: Texts = Field(description="Texts, or objects with `text`.")
    top_n: int = Field(0, ge=0, description="Return only so many documents, the best. 0: all.")
    return_documents: bool = Field(True, description="Repeat the documents in the answer.")


class EmbeddingRequest(EncodedBody):
    """A request for embeddings of texts."""

    use_activation: bool | None = Field(
        None,
        validation_alias=AliasChoices("use_activation", "normalize"),
        description="Scale embeddings to length 1; omitted: as the model's authors do. Also called normalize.",
    )
    prompt_name: str | None = Field(
        None,
        description="Put this prompt of the model's config_sentence_transformers.json in front of each text.",
    )
    prompt: str | None = Field(
        None, description="Put this text in front of each text, for example an instruction."
    )

    @model_validator(mode="after")
    def _one_prompt(self) -> "EmbeddingRequest":
        asked = self.prompt_name is not None or self.prompt is not None
        if self.prompt_name is not None and self.prompt is not None:
            raise ValueError("prompt and prompt_name exclude each other; send one of them")
        if asked and not (self.input and all(isinstance(text, str) for text in self.input)):
            raise ValueError("prompt and prompt_name need inputs that are texts")
        return self


class Embedding(TypedDict):
    """The embedding of an input."""

    object: Literal["embedding"]
    index: int
    embedding: Annotated[
        list[float] | str,
        Field(description="Numbers, or their bytes with encoding_format=base64."),
    ]


class EmbeddingUsage(TypedDict):
    """Token counts of a request to a pooling model."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(TypedDict):
    """Embeddings in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class ListHead(TypedDict):
    """The fields of a list of results other than its data."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: EmbeddingUsage


class Score(TypedDict):
    """The score of a pair."""

    object: Literal["score"]
    index: int
    score: float


class ScoreList(ListHead):
    """Scores in the order of the pairs."""

    data: list[Score]


class RerankResult(TypedDict):
    """One document's relevance."""

    index: Annotated[int, Field(description="The document's place in the request.")]
    relevance_score: float
    document: NotRequired[Annotated[dict[str, str], Field(description="Unless return_documents is false.")]]


class RerankAnswer(TypedDict):
    """Documents, the most relevant first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage


class CohereRerankAnswer(RerankAnswer):
    """Documents, the most relevant first, with Cohere's additions."""

    meta: Annotated[
        dict[str, dict[str, Any]],
        Field(description="`api_version`, `billed_units` (a search for each 100 documents) and `tokens`."),
    ]


class Classification(TypedDict):
    """The classes of an input."""

    index: int
    label: Annotated[str | None, Field(description="Name of the class with the largest value.")]
    probs: Annotated[
        list[float], Field(description="A value for each class, in the order of the model's labels.")
    ]
    num_classes: int


class ClassificationList(ListHead):
    """Classes in the order of the inputs."""

    data: list[Classification]


class PoolingResult(TypedDict):
    """The result of an input."""

    object: Literal["pooling"]
    index: int
    data: Annotated[
        list[float] | list[list[float]] | str,
        Field(
            description="Numbers, or a row of numbers for each token; their bytes with encoding_format=base64."
        ),
    ]


class PoolingList(ListHead):
    """Results in the order of the inputs."""

    data: list[PoolingResult]
