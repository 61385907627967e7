"""The answers of chats and completions."""

from typing import Annotated, Any, Final, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from gateway.generation.logprobs import ChatLogprobs, CompletionLogprobs


class PromptTokensDetails(TypedDict):
    """Details of the prompt's tokens."""

    cached_tokens: Annotated[int, Field(description="Prompt tokens served from the prefix cache.")]


class CompletionTokensDetails(TypedDict):
    """Details of the answer's tokens."""

    reasoning_tokens: Annotated[int, Field(description="Tokens of thinking; its markers count, too.")]


class CompletionUsage(TypedDict):
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


class CalledFunction(TypedDict):
    """The function of a tool call."""

    name: str
    arguments: Annotated[str, Field(description="A JSON object, as text.")]


class ToolCall(TypedDict):
    """A call of the model."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(TypedDict):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[
        Annotated[str | None, Field(description="The thinking of a reasoning model (vLLM's name).")]
    ]
    reasoning_content: NotRequired[
        Annotated[str | None, Field(description="The same under DeepSeek's name.")]
    ]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    """An answer to a conversation."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: StopReason
    token_ids: NotRequired[TokenIdList]


class ChatCompletion(TypedDict):
    """An answered conversation."""

    id: str
    object: Literal["chat.completion"]
    created: Annotated[int, Field(description="Seconds since the epoch.")]
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    service_tier: Annotated[Literal["default"], Field(description="There is one tier.")]
    system_fingerprint: Fingerprint
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[TokenIdList]


class CompletionChoice(TypedDict):
    """A continuation of a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason
    token_ids: NotRequired[TokenIdList]
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[TokenIdList]


class Completion(TypedDict):
    """Continued prompts."""

    id: str
    object: Literal["text_completion"]
    created: Annotated[int, Field(description="Seconds since the epoch.")]
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage
    system_fingerprint: Fingerprint


class FunctionDelta(TypedDict):
    """A part of a call: first the name, then pieces of the arguments."""

    name: NotRequired[str | None]
    arguments: str


class ToolCallDelta(TypedDict):
    """An update of a call."""

    index: Annotated[int, Field(description="Number of the call in the message.")]
    id: NotRequired[str | None]
    type: NotRequired[Literal["function"] | None]
    function: FunctionDelta


class MessageDelta(TypedDict):
    """An update of the assistant's message."""

    role: NotRequired[
        Annotated[Literal["assistant"] | None, Field(description="In the first chunk of a choice.")]
    ]
    content: NotRequired[str | None]
    refusal: NotRequired[None]
    reasoning: NotRequired[Annotated[str | None, Field(description="Thinking (vLLM's name).")]]
    reasoning_content: NotRequired[
        Annotated[str | None, Field(description="The same under DeepSeek's name.")]
    ]
    tool_calls: NotRequired[list[ToolCallDelta] | None]


class ChatChunkChoice(TypedDict):
    """An update of a choice."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: Annotated[ChatFinishReason | None, Field(description="In the choice's last chunk.")]
    stop_reason: NotRequired[StopReason]
    token_ids: NotRequired[TokenIdList]


class ChatChunk(TypedDict):
    """A piece of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: Annotated[list[ChatChunkChoice], Field(description="None in the chunk with the usage.")]
    usage: NotRequired[
        Annotated[CompletionUsage | None, Field(description="With stream_options.include_usage.")]
    ]
    service_tier: NotRequired[Annotated[Literal["default"] | None, Field(description="In last chunks.")]]
    system_fingerprint: NotRequired[Annotated[str | None, Field(description="In last chunks.")]]
    prompt_token_ids: NotRequired[TokenIdList]


class CompletionChunkChoice(TypedDict):
    """An update of a choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Annotated[FinishReason | None, Field(description="In the choice's last chunk.")]
    stop_reason: NotRequired[StopReason]
    token_ids: NotRequired[TokenIdList]
    prompt_token_ids: NotRequired[TokenIdList]


class CompletionChunk(TypedDict):
    """A piece of a streamed completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: Annotated[list[CompletionChunkChoice], Field(description="None in the chunk with the usage.")]
    usage: NotRequired[
        Annotated[CompletionUsage | None, Field(description="With stream_options.include_usage.")]
    ]
    system_fingerprint: NotRequired[Annotated[str | None, Field(description="In last chunks.")]]
