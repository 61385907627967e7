"""The answers of the Messages API."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict


class AnthropicErrorDetail(TypedDict):
    """What went wrong."""

    type: Annotated[str, Field(description="Anthropic's error type, for example invalid_request_error.")]
    message: Annotated[str, Field(description="One line: what was wrong, and what to change.")]


class AnthropicErrorAnswer(TypedDict):
    """Anthropic's error object."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: Annotated[str, Field(description="The same as the headers Request-Id and X-Request-Id.")]


class AnswerBlock(TypedDict):
    """A block of an answer. Its type says which fields it has."""

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[Annotated[str | None, Field(description="With the type text.")]]
    thinking: NotRequired[Annotated[str | None, Field(description="With the type thinking.")]]
    signature: NotRequired[
        Annotated[str | None, Field(description="With the type thinking: send it back with it.")]
    ]
    id: NotRequired[Annotated[str | None, Field(description="With the type tool_use: the call's id.")]]
    name: NotRequired[Annotated[str | None, Field(description="With the type tool_use: the tool.")]]
    input: NotRequired[
        Annotated[
            dict[str, Any] | None,
            Field(
                description="With the type tool_use: the call's arguments; empty if max_tokens cut them off."
            ),
        ]
    ]


class OutputTokensDetails(TypedDict):
    """Details of the answer's tokens."""

    thinking_tokens: Annotated[int, Field(description="Tokens of thinking, its markers included.")]


class TokenCounts(TypedDict):
    """Token counts. The prompt has as many tokens as the three counts of its tokens together."""

    input_tokens: Annotated[int, Field(description="Prompt tokens that were computed.")]
    cache_creation_input_tokens: Annotated[int, Field(description="Always 0: caching costs nothing.")]
    cache_read_input_tokens: Annotated[int, Field(description="Prompt tokens from the prefix cache.")]
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class MessageUsage(TokenCounts):
    """Token counts of a whole message."""

    service_tier: Literal["standard"]


class MessageHead(TypedDict):
    """The fields that begin a message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str


class MessageAnswer(MessageHead):
    """The assistant's next turn."""

    content: list[AnswerBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: Annotated[str | None, Field(description="The stop sequence that ended the answer.")]
    usage: MessageUsage


class TokenCount(TypedDict):
    """The length of a prompt."""

    input_tokens: int
