"""The body of ``/v1/completions``."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import BeforeValidator, Field, model_validator

from gateway.quoting import quote
from gateway.schemas.base import Unserved
from gateway.schemas.sampling import (
    COMMON_UNSERVED,
    UINT32_MAX,
    SamplingRequest,
    or_default,
)
from protos import limits

# OpenAI's default for this endpoint; chats continue to the end of the context.
DEFAULT_MAX_TOKENS: Final = 16

_SHAPES: Final = "a string, a list of strings, a list of token ids or a list of such lists"


def is_token_ids(value: Any) -> bool:
    """Whether ``value`` is a list of unsigned 32-bit integers."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= UINT32_MAX for item in value)


def as_prompts(value: Any) -> list[str | list[int]]:
    """Returns a list of prompts, each text or token ids, from any shape of OpenAI's API.

    Raises:
        ValueError: names the shapes.
    """
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise ValueError(f"must be {_SHAPES}, got {quote(value)}")  # noqa: TRY004 - pydantic's signal
    # A model might start from an empty prompt, depending on its BOS token, but a client never means that.
    if not value or any(item in ("", []) for item in value):
        raise ValueError("is empty: it must give at least one character or token id")
    if type(value[0]) is int:
        value = [value]
    if all(isinstance(item, str) for item in value) or all(is_token_ids(item) for item in value):
        prompts: list[str | list[int]] = value
        return prompts
    raise ValueError(f"must be {_SHAPES} (token ids are integers from 0), got {quote(value)}")


class CompletionRequest(SamplingRequest):
    """A request to continue prompts."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        **COMMON_UNSERVED,
        "suffix": Unserved(("",), "text after the insertion point is not served"),
        "max_completion_tokens": Unserved((), "it belongs to chats; send 'max_tokens'"),
    }

    prompt: Annotated[
        list[str | list[int]],
        BeforeValidator(as_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
        Field(description="One prompt or several, as text or as token ids."),
    ]

    max_tokens: Annotated[
        int | None,
        Field(
            ge=0, le=UINT32_MAX, description="Maximum number of new tokens, 16 by default; 0 only with echo."
        ),
    ] = None
    logprobs: Annotated[
        int | None,
        Field(
            ge=0,
            le=limits.MAX_LOGPROBS,
            description="Report each token's log-probability, and those of this many of the likeliest"
            " tokens.",
        ),
    ] = None
    echo: Annotated[
        bool, or_default(False), Field(description="Repeat the prompt at the beginning of each choice.")
    ] = False

    @model_validator(mode="after")
    def _zero_tokens_need_echo(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens=0 is only allowed together with echo=true; ask for at least 1 token")
        return self

    @property
    def output_limit(self) -> int:
        """Maximum number of new tokens per choice."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else max(1, self.max_tokens)

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report with each new token; ``None``: no log-probabilities."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt's tokens.

        An answer that repeats its prompt reports the prompt's tokens in the same detail as its own.
        """
        asked = [
            count
            for count in (self.prompt_logprobs, self.logprobs if self.echo else None)
            if count is not None
        ]
        return max(asked, default=None)

    @property
    def prompt_only(self) -> bool:
        """Whether the answer consists of the prompt alone."""
        return self.max_tokens == 0
