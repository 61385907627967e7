"""The answers of the Responses API."""

from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from pydantic import Field
from typing_extensions import TypedDict

from gateway.schemas.answers import ChatToken


class OutputText(TypedDict):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(description="Always empty.")]
    logprobs: Annotated[
        list[ChatToken], Field(description="With message.output_text.logprobs among 'include'.")
    ]


class ReasoningContent(TypedDict):
    """A piece of thinking."""

    type: Literal["reasoning_text"]
    text: str


ItemStatus = Annotated[
    Literal["in_progress", "completed", "incomplete"],
    Field(description="incomplete: the answer was cut in this item."),
]


class OutputMessage(TypedDict):
    """The text of the answer."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(TypedDict):
    """Thinking in front of the answer."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: Annotated[list[Any], Field(description="Always empty: 'content' has the thinking itself.")]
    content: list[ReasoningContent]
    encrypted_content: None


class OutputFunctionCall(TypedDict):
    """A call that the model makes."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: Annotated[str, Field(description="The id for the function_call_output that answers it.")]
    name: str
    namespace: NotRequired[Annotated[str | None, Field(description="The function's, if it has one.")]]
    arguments: Annotated[str, Field(description="A JSON object, as text.")]


class OutputCustomCall(TypedDict):
    """A call of a custom tool."""

    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: Annotated[str, Field(description="The id for the custom_tool_call_output that answers it.")]
    name: str
    namespace: NotRequired[Annotated[str | None, Field(description="The tool's, if it has one.")]]
    input: Annotated[str, Field(description="Plain text.")]


OutputItemAnswer: TypeAlias = OutputMessage | OutputReasoning | OutputFunctionCall | OutputCustomCall
OutputPart: TypeAlias = OutputText | ReasoningContent


class InputDetails(TypedDict):
    """Details of the input's tokens."""

    cached_tokens: Annotated[int, Field(description="Tokens served from the prefix cache.")]
    cache_write_tokens: Annotated[int, Field(description="Always 0: writing into the cache costs nothing.")]


class OutputDetails(TypedDict):
    """Details of the output's tokens."""

    reasoning_tokens: Annotated[int, Field(description="Tokens of thinking.")]


class ResponseUsage(TypedDict):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class InputTokens(TypedDict):
    """The length of a prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class IncompleteDetails(TypedDict):
    """Why a response is incomplete."""

    reason: Annotated[
        Literal["max_output_tokens"], Field(description="Its limit of tokens, or the end of the context.")
    ]


class ResponseFailure(TypedDict):
    """Why a response failed."""

    code: str
    message: str


ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponseAnswer(TypedDict):
    """A response. Most fields repeat the request."""

    id: str
    object: Literal["response"]
    created_at: Annotated[int, Field(description="Seconds since the epoch.")]
    status: ResponseStatus
    background: Literal[False]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItemAnswer]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Annotated[Literal[False], Field(description="Nothing is stored, whatever the request says.")]
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: Annotated[list[dict[str, Any]], Field(description="The functions; skipped tools are missing.")]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
