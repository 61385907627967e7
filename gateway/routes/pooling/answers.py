"""Answers about pooling models, as the OpenAPI document describes them."""

from typing import Annotated, Literal

from pydantic import Field

from gateway.schemas.answers import AnswerModel


class Embedding(AnswerModel):
    """The embedding of one input."""

    object: Literal["embedding"]
    index: int
    embedding: Annotated[
        list[float] | str,
        Field(description="Numbers, or their bytes with encoding_format=base64."),
    ]


class EmbeddingUsage(AnswerModel):
    """Token counts of a request to a pooling model."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(AnswerModel):
    """Embeddings in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Score(AnswerModel):
    """The score of one pair."""

    object: Literal["score"]
    index: int
    score: float


class ScoreList(AnswerModel):
    """Scores in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class RerankDocument(AnswerModel):
    """A document of the request."""

    text: str


class RerankResult(AnswerModel):
    """One document's relevance."""

    index: Annotated[int, Field(description="The document's place in the request.")]
    relevance_score: float
    document: Annotated[RerankDocument | None, Field(description="Unless return_documents is false.")] = None


class RerankAnswer(AnswerModel):
    """Documents, the most relevant first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage


class CohereApiVersion(AnswerModel):
    """Whose shape the answer has."""

    version: Literal["2"]


class CohereBilledUnits(AnswerModel):
    """What Cohere would bill."""

    search_units: Annotated[int, Field(description="One for each 100 documents.")]


class CohereTokens(AnswerModel):
    """Token counts."""

    input_tokens: int


class CohereMeta(AnswerModel):
    """What Cohere's answers have beside results."""

    api_version: CohereApiVersion
    billed_units: CohereBilledUnits
    tokens: CohereTokens


class CohereRerankAnswer(RerankAnswer):
    """Documents, the most relevant first, with what Cohere adds."""

    meta: CohereMeta


class Classification(AnswerModel):
    """The classes of one input."""

    index: int
    label: Annotated[str | None, Field(description="Name of the class with the largest value.")]
    probs: Annotated[
        list[float], Field(description="A value for each class, in the order of the model's labels.")
    ]
    num_classes: int


class ClassificationList(AnswerModel):
    """Classes in the order of the inputs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classification]
    usage: EmbeddingUsage


class PoolingResult(AnswerModel):
    """The result of one input."""

    object: Literal["pooling"]
    index: int
    data: Annotated[
        list[float] | list[list[float]] | str,
        Field(
            description="Numbers, or a row of numbers for each token; their bytes with encoding_format=base64."
        ),
    ]


class PoolingList(AnswerModel):
    """Results in the order of the inputs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PoolingResult]
    usage: EmbeddingUsage
