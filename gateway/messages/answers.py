"""Answers of the Messages API as the OpenAPI document describes them."""

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.schemas.answers import AnswerModel


class AnthropicErrorDetail(AnswerModel):
    """What went wrong."""

    type: Annotated[str, Field(description="Anthropic's error type, for example invalid_request_error.")]
    message: Annotated[str, Field(description="One line: what was wrong, and what to change.")]


class AnthropicErrorAnswer(AnswerModel):
    """Anthropic's error object."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: Annotated[str, Field(description="The same as the headers Request-Id and X-Request-Id.")]


class AnswerBlock(AnswerModel):
    """A block of an answer. Its type says which fields it has."""

    type: Literal["text", "thinking", "tool_use"]
    text: Annotated[str | None, Field(description="With the type text.")] = None
    thinking: Annotated[str | None, Field(description="With the type thinking.")] = None
    signature: Annotated[str | None, Field(description="With the type thinking: send it back with it.")] = (
        None
    )
    id: Annotated[str | None, Field(description="With the type tool_use: the call's id.")] = None
    name: Annotated[str | None, Field(description="With the type tool_use: the tool.")] = None
    input: Annotated[
        dict[str, Any] | None,
        Field(description="With the type tool_use: the call's arguments; empty if max_tokens cut them off."),
    ] = None


class OutputTokensDetails(AnswerModel):
    """Details of the answer's tokens."""

    thinking_tokens: Annotated[int, Field(description="Tokens of thinking, its markers included.")]


class MessageUsage(AnswerModel):
    """Token counts. The prompt has as many tokens as the three counts of its tokens together."""

    input_tokens: Annotated[int, Field(description="Prompt tokens that were computed.")]
    cache_creation_input_tokens: Annotated[int, Field(description="Always 0: caching costs nothing.")]
    cache_read_input_tokens: Annotated[int, Field(description="Prompt tokens from the prefix cache.")]
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    service_tier: Literal["standard"]


class MessageAnswer(AnswerModel):
    """The assistant's next turn."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: Annotated[str | None, Field(description="The stop sequence that ended the answer.")]
    usage: MessageUsage


class TokenCount(AnswerModel):
    """The length of a prompt."""

    input_tokens: int
