"""The body of ``/v1/embeddings``."""

from typing import Annotated

from pydantic import AliasChoices, Field, model_validator

from gateway.schemas.pooling import EncodedBody


class EmbeddingRequest(EncodedBody):
    """A request for embeddings of one or more texts."""

    use_activation: Annotated[
        bool | None,
        Field(
            validation_alias=AliasChoices("use_activation", "normalize"),
            description="Scale embeddings to length 1; omitted: as the model's authors do. Also called normalize.",
        ),
    ] = None
    prompt_name: Annotated[
        str | None,
        Field(
            description="Put this prompt of the model's config_sentence_transformers.json in front of each text."
        ),
    ] = None
    prompt: Annotated[
        str | None, Field(description="Put this text in front of each text, for example an instruction.")
    ] = None

    @model_validator(mode="after")
    def _one_prompt(self) -> "EmbeddingRequest":
        asked = self.prompt_name is not None or self.prompt is not None
        if self.prompt_name is not None and self.prompt is not None:
            raise ValueError("prompt and prompt_name exclude each other; send one of them")
        if asked and not (self.input and all(isinstance(text, str) for text in self.input)):
            raise ValueError("prompt and prompt_name need inputs that are texts")
        return self
