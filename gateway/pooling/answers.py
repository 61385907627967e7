"""The answers of pooling models."""

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict


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


class RerankDocument(TypedDict):
    """A document of the request."""

    text: str


class RerankResult(TypedDict):
    """One document's relevance."""

    index: Annotated[int, Field(description="The document's place in the request.")]
    relevance_score: float
    document: NotRequired[
        Annotated[RerankDocument | None, Field(description="Unless return_documents is false.")]
    ]


class RerankAnswer(TypedDict):
    """Documents, the most relevant first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage


class CohereApiVersion(TypedDict):
    """The version of Cohere's API."""

    version: Literal["2"]


class CohereBilledUnits(TypedDict):
    """The units of Cohere's bills."""

    search_units: Annotated[int, Field(description="One for each 100 documents.")]


class CohereTokens(TypedDict):
    """Token counts."""

    input_tokens: int


class CohereMeta(TypedDict):
    """Cohere's additions to results."""

    api_version: CohereApiVersion
    billed_units: CohereBilledUnits
    tokens: CohereTokens


class CohereRerankAnswer(RerankAnswer):
    """Documents, the most relevant first, with Cohere's additions."""

    meta: CohereMeta


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
