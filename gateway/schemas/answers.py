"""Answers as the OpenAPI document describes them.

The routes write their JSON directly, because validation would cost time with every answer. A test checks real
answers against these models.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field


class AnswerModel(BaseModel):
    """An object in an answer."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(AnswerModel):
    """OpenAI's error object."""

    message: Annotated[str, Field(description="One line: what was wrong, and what to change.")]
    type: Annotated[str, Field(description="OpenAI's error type, for example invalid_request_error.")]
    param: Annotated[str | None, Field(description="The parameter at fault.")]
    code: Annotated[
        str | None, Field(description="OpenAI's error code, for example context_length_exceeded.")
    ]


class ErrorAnswer(AnswerModel):
    """The body of every answer with an error status."""

    error: ErrorDetail


class PromptTokensDetails(AnswerModel):
    """Details of the prompt's tokens."""

    cached_tokens: Annotated[int, Field(description="Prompt tokens served from the prefix cache.")]


class CompletionTokensDetails(AnswerModel):
    """Details of the answer's tokens."""

    reasoning_tokens: Annotated[int, Field(description="Tokens of thinking; its markers count, too.")]


class CompletionUsage(AnswerModel):
    """Token counts of an answer."""

    prompt_tokens: Annotated[
        int, Field(description="Each prompt counts once, however many choices continue it.")
    ]
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


Fingerprint = Annotated[
    str, Field(description="Changes with the model's files, its dtype, its context and Triptych's version.")
]

_ENDS: Final = "stop: an end token or a stop string; length: max_tokens or the end of the context"

FinishReason = Annotated[Literal["stop", "length"], Field(description=f"{_ENDS}.")]
ChatFinishReason = Annotated[
    Literal["stop", "length", "tool_calls"], Field(description=f"{_ENDS}; tool_calls: the message has calls.")
]
StopReason = Annotated[
    str | int | None,
    Field(description="The stop string or token id that ended the text; null for the model's end token."),
]
PromptLogprobs = Annotated[
    list[dict[str, dict[str, Any]] | None] | None,
    Field(
        description="With prompt_logprobs: for each prompt token but the first, its log-probability, rank and"
        " text, and those of the likeliest tokens, by token id."
    ),
]


TokenIdList = Annotated[list[int] | None, Field(description="With return_token_ids.")]


class CalledFunction(AnswerModel):
    """The function of a tool call."""

    name: str
    arguments: Annotated[str, Field(description="A JSON object, as text.")]


class ToolCall(AnswerModel):
    """One call that the model makes."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(AnswerModel):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: Annotated[
        str | None, Field(description="The thinking of a reasoning model (vLLM's name).")
    ] = None
    reasoning_content: Annotated[str | None, Field(description="The same under DeepSeek's name.")] = None
    tool_calls: list[ToolCall] | None = None


class ChatTokenLogprob(AnswerModel):
    """The log-probability of a token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(ChatTokenLogprob):
    """A token of the answer, with the likeliest tokens in its place."""

    top_logprobs: list[ChatTokenLogprob]


class ChatLogprobs(AnswerModel):
    """Log-probabilities of a chat choice."""

    content: list[ChatToken]


class ChatChoice(AnswerModel):
    """One of the answers to a conversation."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: StopReason
    token_ids: TokenIdList = None


class ChatCompletion(AnswerModel):
    """An answered conversation."""

    id: str
    object: Literal["chat.completion"]
    created: Annotated[int, Field(description="Seconds since the epoch.")]
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    service_tier: Annotated[Literal["default"], Field(description="There is one tier.")]
    system_fingerprint: Fingerprint
    prompt_logprobs: PromptLogprobs = None
    prompt_token_ids: TokenIdList = None


class CompletionLogprobs(AnswerModel):
    """Log-probabilities of a completion, one entry per token in each list."""

    tokens: list[str]
    token_logprobs: Annotated[
        list[float | None], Field(description="null for the first token of an echoed prompt.")
    ]
    top_logprobs: list[dict[str, float] | None]
    text_offset: Annotated[
        list[int], Field(description="Where each token's text begins in the choice's text.")
    ]


class CompletionChoice(AnswerModel):
    """One continuation of one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason
    token_ids: TokenIdList = None
    prompt_logprobs: PromptLogprobs = None
    prompt_token_ids: TokenIdList = None


class Completion(AnswerModel):
    """Continued prompts."""

    id: str
    object: Literal["text_completion"]
    created: Annotated[int, Field(description="Seconds since the epoch.")]
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage
    system_fingerprint: Fingerprint


class FunctionDelta(AnswerModel):
    """A part of a call: first the name, then pieces of the arguments."""

    name: str | None = None
    arguments: str


class ToolCallDelta(AnswerModel):
    """News of one call."""

    index: Annotated[int, Field(description="Number of the call in the message.")]
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class MessageDelta(AnswerModel):
    """News of the assistant's message."""

    role: Annotated[Literal["assistant"] | None, Field(description="In the first chunk of a choice.")] = None
    content: str | None = None
    refusal: None = None
    reasoning: Annotated[str | None, Field(description="Thinking (vLLM's name).")] = None
    reasoning_content: Annotated[str | None, Field(description="The same under DeepSeek's name.")] = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(AnswerModel):
    """News of one choice."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: Annotated[ChatFinishReason | None, Field(description="In the choice's last chunk.")]
    stop_reason: StopReason = None
    token_ids: TokenIdList = None


class ChatChunk(AnswerModel):
    """A piece of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: Annotated[list[ChatChunkChoice], Field(description="None in the chunk with the usage.")]
    usage: Annotated[CompletionUsage | None, Field(description="With stream_options.include_usage.")] = None
    service_tier: Annotated[Literal["default"] | None, Field(description="In last chunks.")] = None
    system_fingerprint: Annotated[str | None, Field(description="In last chunks.")] = None
    prompt_token_ids: TokenIdList = None


class CompletionChunkChoice(AnswerModel):
    """News of one choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Annotated[FinishReason | None, Field(description="In the choice's last chunk.")]
    stop_reason: StopReason = None
    token_ids: TokenIdList = None
    prompt_token_ids: TokenIdList = None


class CompletionChunk(AnswerModel):
    """A piece of a streamed completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: Annotated[list[CompletionChunkChoice], Field(description="None in the chunk with the usage.")]
    usage: Annotated[CompletionUsage | None, Field(description="With stream_options.include_usage.")] = None
    system_fingerprint: Annotated[str | None, Field(description="In last chunks.")] = None


class ModelCard(AnswerModel):
    """A served model, or one of its LoRA adapters."""

    id: str
    object: Literal["model"]
    created: Annotated[int, Field(description="When the model first became ready, seconds since the epoch.")]
    owned_by: str
    root: Annotated[str, Field(description="Where the model or the adapter was loaded from.")]
    parent: Annotated[str | None, Field(description="An adapter's base model.")]
    max_model_len: Annotated[int, Field(description="Tokens of a prompt and its answer together.")]
    pool_tasks: Annotated[
        list[str] | None, Field(description="Only for pooling models: what they serve, for example embed.")
    ] = None
    embedding_size: Annotated[int | None, Field(description="Only for embedding models.")] = None


class ModelDeleted(AnswerModel):
    """A LoRA adapter that no request can name any more."""

    id: str
    object: Literal["model"]
    deleted: Literal[True]


class ModelList(AnswerModel):
    """The served model and its LoRA adapters."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(AnswerModel):
    """The tokens of a text or a conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: Annotated[
        list[str] | None, Field(description="The vocabulary's spelling, with return_token_strs.")
    ]


class Detokenized(AnswerModel):
    """The text of token ids."""

    prompt: str


class Version(AnswerModel):
    """Triptych's version."""

    version: str
