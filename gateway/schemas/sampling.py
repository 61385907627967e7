"""The common parameters of chats and completions: sampling, stopping, streaming.

Names and meanings are OpenAI's, or vLLM's if OpenAI has none. Parameters are checked for their range here and
passed on; the scheduler knows whether the workers support them.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from gateway.schemas.base import RequestModel, Unserved, quote
from gateway.schemas.structured import ResponseFormat, StructuredOutputs
from protos import limits
from protos.triptych.v1 import common_pb2 as pb

MAX_BAD_WORDS: Final = limits.MAX_BAD_WORDS // 2
"""Each word becomes up to two token sequences: at the start of a text, and after a space."""

UINT32_MAX: Final = 2**32 - 1

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much to think."""

TokenId = Annotated[int, Field(ge=0, le=UINT32_MAX)]

# What an omitted parameter means if generation_config.json has a value for it.
_RECOMMENDED: Final = "the model's recommended value"

# Validation stops at the first invalid id: a list of millions must not be searched for others.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]

# Bounded, because names go into the access log. Clients without a model's name send an empty one.
ModelName = Annotated[
    str | None, Field(max_length=256), BeforeValidator(lambda name: None if name == "" else name)
]


def _stop_strings(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise ValueError("must be a string or a list of strings")  # noqa: TRY004 - pydantic's signal
    return _strings(stops, limits.MAX_STOP_STRINGS, limits.MAX_STOP_STRING_LENGTH)


def _bad_words(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise ValueError("must be a list of strings")  # noqa: TRY004 - pydantic's signal
    return _strings(value, MAX_BAD_WORDS, limits.MAX_BAD_WORD_LENGTH)


def _strings(strings: list[Any], most: int, longest: int) -> list[str]:
    # Checked before the strings themselves.
    if len(strings) > most:
        raise ValueError(f"takes at most {most} strings, got {len(strings)}")
    if not all(isinstance(string, str) for string in strings):
        raise ValueError("must contain only strings")
    if "" in strings:
        raise ValueError("must not contain an empty string")
    if any(len(string) > longest for string in strings):
        raise ValueError(f"takes strings of at most {longest} characters")
    return strings


def _token_keys(value: Any) -> Any:
    """Turns JSON's text keys into token ids."""
    if not isinstance(value, dict):
        return value
    if len(value) > limits.MAX_LOGIT_BIASES:
        raise ValueError(f"takes at most {limits.MAX_LOGIT_BIASES} token ids, got {len(value)}")
    for key in value:
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10):
            raise ValueError(
                f'must map token ids to biases, for example {{"50256": -100}}, and {quote(key)} is not a token id'
            )
    return {int(key): bias for key, bias in value.items()}


def in_bounds(parameter: str, default: Any = ..., **others: Any) -> Any:
    """Returns a field with the wire schema's bounds of a sampling parameter."""
    bounds = limits.SAMPLING[parameter]
    known: dict[str, Any] = {}
    if bounds.HasField("min"):
        known["gt" if bounds.above_min else "ge"] = bounds.min
    if bounds.HasField("max"):
        known["le"] = bounds.max
    return Field(default, **known, **others)


class StreamOptions(RequestModel):
    """Options of a stream."""

    include_usage: bool = Field(False, description="End the stream with a chunk of token counts.")
    continuous_usage_stats: bool = Field(
        False, description="With include_usage: token counts in every chunk."
    )


# Accepted by both endpoints, with values without effect.
COMMON_UNSERVED: Final[Mapping[str, Unserved]] = {
    "use_beam_search": Unserved((False,)),
    "logprob_token_ids": Unserved(([],)),
    **dict.fromkeys(
        (
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "guided_decoding_backend",
            "guided_whitespace_pattern",
        ),
        Unserved((), "use structured_outputs or response_format, as with vLLM"),
    ),
    "prompt_embeds": Unserved((), "send the prompt as text or as token ids"),
    "repetition_detection": Unserved(),
    "watermarking": Unserved((False,)),
    "kv_transfer_params": Unserved(),
    "vllm_xargs": Unserved(({},)),
}


class SamplingRequest(RequestModel):
    """The common part of both completions endpoints."""

    prompt_param: ClassVar[str] = "prompt"
    """The client's name for the prompt, in errors."""
    budget_is_a_hint: ClassVar[bool] = False
    """Whether a model that does not think may ignore ``thinking_token_budget``."""

    model: ModelName = Field(None, description="A name from /v1/models; omitted: the served model.")
    temperature: float | None = in_bounds(
        "temperature", None, description=f"0: greedy; omitted: {_RECOMMENDED}, else 1."
    )
    top_p: float | None = in_bounds(
        "top_p",
        None,
        description="Nucleus sampling: keep the smallest set of tokens with this probability mass. 1:"
        f" off; omitted: {_RECOMMENDED}, else off.",
    )
    top_k: int | None = Field(
        None,
        ge=-1,
        le=2**31 - 1,
        description="Keep this many of the likeliest tokens. -1 and 0: off; omitted:"
        f" {_RECOMMENDED}, else off.",
    )
    min_p: float | None = in_bounds(
        "min_p",
        None,
        description="Drop tokens less likely than this fraction of the likeliest one. 0: off; omitted:"
        f" {_RECOMMENDED}, else off.",
    )
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    frequency_penalty: float | None = in_bounds("frequency_penalty", None)
    presence_penalty: float | None = in_bounds("presence_penalty", None)
    repetition_penalty: float | None = in_bounds(
        "repetition_penalty",
        None,
        description="Above 1: tokens that have appeared become less likely. 1: off; omitted:"
        f" {_RECOMMENDED}, else off.",
    )
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, in_bounds("logit_bias")]] | None, BeforeValidator(_token_keys)
    ] = None
    allowed_token_ids: TokenIds | None = Field(None, min_length=1, max_length=limits.MAX_ALLOWED_TOKEN_IDS)
    bad_words: Annotated[list[str], BeforeValidator(_bad_words, json_schema_input_type=list[str] | None)] = (
        Field(
            default_factory=list,
            description="Texts that must not be produced, at the start of a word or within a text.",
        )
    )
    n: int = Field(1, ge=1, le=limits.MAX_SEQUENCES, description="Choices for each prompt.")
    best_of: int | None = Field(
        None, ge=1, description="Must equal n: no choices are generated and discarded."
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=limits.MAX_LOGPROBS,
        description="Log-probabilities of the prompt's tokens; not streamed.",
    )
    return_tokens_as_token_ids: bool = Field(
        False, description="Write tokens in log-probabilities as token_id:5."
    )
    return_token_ids: bool = Field(False, description="Add the ids of the prompt's and the answer's tokens.")
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=UINT32_MAX,
        description="Keep only this many tokens of a prompt; -1: as many as leave room for the answer.",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Which end loses tokens; left by default."
    )
    max_tokens: int | None = Field(None, ge=1, le=UINT32_MAX)
    min_tokens: int = Field(0, ge=0, le=UINT32_MAX)
    stop: Annotated[
        list[str], BeforeValidator(_stop_strings, json_schema_input_type=str | list[str] | None)
    ] = Field(
        default_factory=list,
        description=f"Texts that end the answer: at most {limits.MAX_STOP_STRINGS} of"
        f" {limits.MAX_STOP_STRING_LENGTH:,} characters each.",
    )
    stop_token_ids: TokenIds = Field(default_factory=list, max_length=limits.MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: bool = Field(
        False, description="Keep the stop string at the end of the answer."
    )
    thinking_token_budget: int | None = Field(
        None,
        ge=-1,
        le=UINT32_MAX,
        description="Most tokens of a thought of the model; then its end is written, and the answer follows. 0:"
        " it ends at once; -1: no limit, whatever the effort says.",
    )
    ignore_eos: bool = False
    skip_special_tokens: bool = Field(True, description="Omit special tokens from the text.")
    spaces_between_special_tokens: bool = Field(
        True,
        description="With skip_special_tokens=false: spaces around special tokens, if the tokenizer"
        " writes them.",
    )
    add_special_tokens: bool | None = Field(
        None,
        description="Add the tokenizer's own special tokens to prompts. Default: yes for texts, no for"
        " chats.",
    )
    response_format: ResponseFormat | None = Field(
        None, description="Constrains the answer, in OpenAI's form."
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="Constrains the answer, in vLLM's form."
    )
    stream: bool = Field(False, description="Send the answer in pieces, as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream=true.")
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    cache_salt: str | None = Field(None, min_length=1, max_length=limits.MAX_NAME_BYTES)
    user: str | None = Field(None, max_length=512, description="Your end user, for the access log.")

    @model_validator(mode="after")
    def _parameters_agree(self) -> "SamplingRequest":
        limit, formats = self.output_limit, self.response_format
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed together with stream=true")
        if limit is not None and self.min_tokens > limit:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({limit})")
        if self.best_of not in (None, self.n):
            raise ValueError(
                f"best_of={self.best_of} is not supported: all generated choices are returned; omit it, or"
                " send n alone"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs cannot be streamed; send stream=false")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens=0 leaves nothing of the prompt; send at least 1, or -1")
        if formats is not None and formats.type != "text" and self.structured_outputs is not None:
            raise ValueError("response_format and structured_outputs both constrain the answer; send one")
        return self

    @property
    def may_call(self) -> bool:
        """Whether the answer may have calls."""
        return False

    @property
    def effort(self) -> Effort | None:
        """How much to think; ``None``: the request does not say."""
        return None

    @property
    def constrained(self) -> bool:
        """Whether the request may constrain the answer."""
        return self.structured_outputs is not None or self.response_format is not None

    @property
    def constraint_param(self) -> str:
        """The name of the parameter with the answer's constraint."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    def constraint(self) -> pb.StructuredOutput | None:
        """Returns the answer's constraint for the scheduler; ``None`` for any text."""
        asked = self.structured_outputs or self.response_format
        return None if asked is None else asked.to_proto()

    @property
    def output_limit(self) -> int | None:
        """Maximum number of new tokens; ``None``: as many as fit into the context."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report with each new token; ``None``: no log-probabilities."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt's tokens."""
        return self.prompt_logprobs

    @property
    def prompt_only(self) -> bool:
        """Whether the answer consists of the prompt alone."""
        return False

    def with_forced_usage(self) -> Self:
        """Returns the request with token counts in every chunk of its stream, and at the end."""
        if not self.stream:
            return self
        asked = self.stream_options or StreamOptions()
        forced = asked.model_copy(update={"include_usage": True, "continuous_usage_stats": True})
        return self.model_copy(update={"stream_options": forced})

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk carries the usage so far."""
        return (
            self.include_usage
            and self.stream_options is not None
            and self.stream_options.continuous_usage_stats
        )


_SHAPES: Final = "a string, a list of strings, a list of token ids or a list of such lists"


def is_token_ids(value: Any) -> bool:
    """Whether ``value`` is a list of unsigned 32-bit integers."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= UINT32_MAX for item in value)


def as_prompts(value: Any) -> list[str | list[int]]:
    """Returns a list of prompts, each text or token ids, from any shape of OpenAI's API."""
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
