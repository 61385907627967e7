"""The body of ``/v1/responses`` with its tools, and the answers.

A custom tool is a function with a text. OpenAI's own tools (web search, computer use, MCP servers, …) are
skipped: agents send them with every request. Agents group the functions of an MCP server in a namespace; the
model sees both names joined.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, NotRequired, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, ValidationInfo, model_validator
from typing_extensions import TypedDict

from gateway.generation.sequence_text import ChatToken
from gateway.responses_api.input_items import InputItems
from gateway.schemas.base import RequestModel, Unserved, clip, quote
from gateway.schemas.chat import TEMPLATE_UNSERVED
from gateway.schemas.sampling import COMMON_UNSERVED, UINT32_MAX, Effort, SamplingRequest, StreamOptions
from gateway.schemas.structured import MAX_TEXT, JsonSchema, ResponseFormat
from gateway.schemas.tools import (
    INPUT_SCHEMA,
    MAX_TOOLS,
    Allowed,
    Function,
    NamedChoice,
    ToolName,
    bounded,
    check_distinct,
    describe,
)
from protos import limits

_TYPE: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")

MODES: Final = ("none", "auto", "required")


class FunctionTool(Function):
    """A callable function."""

    type: Literal["function"]


class CustomTool(RequestModel):
    """A tool called with a plain text."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: dict[str, Any] | None = Field(
        None, description="A grammar of the text is shown to the model, not enforced."
    )

    def as_function(self, name: str) -> FunctionTool:
        """Returns the tool as a function named ``name``."""
        description = describe(self.description, self.format)
        return FunctionTool(type="function", name=name, description=description, parameters=INPUT_SCHEMA)


class SkippedTool(NamedTuple):
    """A tool without service here."""

    type: str


CallableTool = FunctionTool | CustomTool


def _callable(value: Any, info: ValidationInfo) -> CallableTool | SkippedTool:
    """Reads a function or a custom tool; of any other tool only the type."""
    if not isinstance(value, dict):
        raise ValueError(f"must be a tool (a JSON object), got {quote(value)}")  # noqa: TRY004
    kind = value.get("type")
    if kind == "function":
        return FunctionTool.model_validate(value, context=info.context)
    if kind == "custom":
        return CustomTool.model_validate(value, context=info.context)
    # The type is shown in a header.
    if not isinstance(kind, str) or _TYPE.fullmatch(kind) is None:
        raise ValueError(f"needs a 'type', for example 'function', got {quote(kind)}")
    return SkippedTool(kind)


def full_name(namespace: str | None, name: str) -> str:
    """Returns the model's name of a function."""
    return f"{namespace}__{name}" if namespace else name


class Namespace(RequestModel):
    """A group of functions."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: list[Annotated[CallableTool | SkippedTool, PlainValidator(_callable)]] = Field(fail_fast=True)

    @property
    def functions(self) -> list[tuple[str, CallableTool]]:
        """Its functions, each with the model's name."""
        return [
            (full_name(self.name, tool.name), tool) for tool in self.tools if isinstance(tool, CallableTool)
        ]


ResponseTool = FunctionTool | CustomTool | Namespace | SkippedTool


def _tool(value: Any, info: ValidationInfo) -> ResponseTool:
    if isinstance(value, dict) and value.get("type") == "namespace":
        return Namespace.model_validate(value, context=info.context)
    return _callable(value, info)


class ScopedName(NamedTuple):
    """The client's name of a function."""

    name: str
    namespace: str | None = None
    custom: bool = False


def _callables(tools: Sequence[ResponseTool]) -> Iterator[tuple[str, CallableTool, str | None]]:
    """Yields the model's name of each callable tool, the tool, and its namespace."""
    for tool in tools:
        if isinstance(tool, CallableTool):
            yield tool.name, tool, None
        elif isinstance(tool, Namespace):
            yield from ((name, function, tool.name) for name, function in tool.functions)


def functions_of(tools: Sequence[ResponseTool]) -> list[FunctionTool]:
    """Returns the callable tools under the model's names."""
    return [
        tool.as_function(name) if isinstance(tool, CustomTool) else tool.model_copy(update={"name": name})
        for name, tool, _ in _callables(tools)
    ]


def scoped_names(tools: Sequence[ResponseTool]) -> dict[str, ScopedName]:
    """Returns the client's names of tools by the model's names."""
    return {
        name: ScopedName(tool.name, namespace, isinstance(tool, CustomTool))
        for name, tool, namespace in _callables(tools)
    }


def _distinct(tools: list[ResponseTool]) -> list[ResponseTool]:
    names = [tool.name for tool in functions_of(tools)]
    if len(names) > MAX_TOOLS:
        raise ValueError(f"takes at most {MAX_TOOLS} functions, got {len(names)} with those in namespaces")
    check_distinct(names)
    return tools


ResponseTools = Annotated[
    list[Annotated[ResponseTool, PlainValidator(_tool, json_schema_input_type=dict[str, Any])]],
    Field(fail_fast=True),
    AfterValidator(_distinct),
    BeforeValidator(bounded),
]


def _names_in(namespace: str, tools: Sequence[ResponseTool]) -> list[str]:
    for tool in tools:
        if isinstance(tool, Namespace) and tool.name == namespace:
            return [name for name, _ in tool.functions]
    raise ValueError(f"allows '{clip(namespace)}', which is not among the namespaces in 'tools'")


def _allowed(value: dict[str, Any], given: Sequence[ResponseTool]) -> Allowed:
    tools, mode = value.get("tools"), value.get("mode")
    if mode not in ("auto", "required"):
        raise ValueError(f'needs a mode, "auto" or "required", got {quote(mode)}')
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"needs 'tools', a list of tools, got {quote(tools)}")
    named = [tool for tool in tools if tool.get("type") in ("function", "custom", "namespace")]
    if not all(isinstance(tool.get("name"), str) for tool in named):
        raise ValueError("has a function without a name in 'tools'")
    names = []
    for tool in named:
        names += _names_in(tool["name"], given) if tool["type"] == "namespace" else [_chosen_name(tool)]
    return Allowed(mode, tuple(names))


def _chosen_name(function: dict[str, Any]) -> str:
    """Returns the model's name of a chosen function; the namespace may be a separate field."""
    namespace = function.get("namespace")
    return full_name(namespace if isinstance(namespace, str) else None, function["name"])


def _choice(value: Any, info: ValidationInfo) -> Any:
    if value is None or (isinstance(value, str) and value in MODES):
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    match kind:
        case "function" | "custom" if isinstance(value.get("name"), str):
            return NamedChoice(_chosen_name(value))
        case "allowed_tools":
            return _allowed(value, info.data.get("tools", ()))
        case str() if kind not in ("function", "custom"):
            raise ValueError(f"is not supported: tools of type {quote(kind)} are skipped; choose a function")
    raise ValueError(
        'must be "none", "auto", "required", {"type": "function", "name": "…"} or'
        f' {{"type": "allowed_tools", "mode": "auto", "tools": […]}}, got {quote(value)}'
    )


ResponseToolChoice = Annotated[
    Allowed | NamedChoice | Literal["none", "auto", "required"] | None,
    PlainValidator(_choice, json_schema_input_type=str | dict[str, Any] | None),
]


_LOGPROBS: Final = "message.output_text.logprobs"
_STATELESS: Final = "nothing is stored"
_ONE_ANSWER: Final = "a request has one response; send it several times"

# OpenAI's bounds.
_MAX_METADATA: Final = 16
_MAX_KEY: Final = 64
_MAX_VALUE: Final = 512

Label = Annotated[str | None, Field(max_length=512)]


def _bounded_metadata(metadata: dict[str, str]) -> dict[str, str]:
    if len(metadata) > _MAX_METADATA:
        raise ValueError(f"has {len(metadata)} keys; send at most {_MAX_METADATA}")
    if any(len(key) > _MAX_KEY or len(value) > _MAX_VALUE for key, value in metadata.items()):
        raise ValueError(f"takes keys of at most {_MAX_KEY} and values of at most {_MAX_VALUE} characters")
    return metadata


class TextFormat(RequestModel):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=256, description="Ignored.")
    description: str | None = Field(None, max_length=MAX_TEXT, description="Ignored.")
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="With type json_schema: a JSON schema."
    )
    strict: bool | None = Field(None, description="As in response_format of chats.")

    @model_validator(mode="after")
    def _complete(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema must be given with type 'json_schema', and only then")
        return self

    def for_chat(self) -> ResponseFormat:
        """Returns the same constraint in the form of a chat request."""
        if self.schema_ is None:
            return ResponseFormat(type=self.type)
        schema = JsonSchema.model_construct(name=self.name, schema_=self.schema_, strict=self.strict)
        return ResponseFormat.model_construct(type=self.type, json_schema=schema)


class TextOptions(RequestModel):
    """Options of the answer's text."""

    format: TextFormat | None = Field(None, description="Constrains the answer.")
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Ignored.")


class ReasoningOptions(RequestModel):
    """Options of the model's thinking."""

    effort: Effort | None = Field(
        None,
        description="For the model's chat template, which may not read it, and for the budgets of"
        " --reasoning-effort-budgets.",
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Ignored: the answer has the thinking itself."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="The same under its older name."
    )


class ResponsesRequest(SamplingRequest):
    """A request for a response, with further parameters of vLLM."""

    prompt_param: ClassVar[str] = "input"

    unserved: ClassVar[Mapping[str, Unserved]] = {
        **TEMPLATE_UNSERVED,
        **{name: row for name, row in COMMON_UNSERVED.items() if name != "service_tier"},
        "background": Unserved((False,), f"{_STATELESS}, so no response runs in the background; omit it"),
        "previous_response_id": Unserved((), f"{_STATELESS}; send the earlier items in 'input'"),
        "conversation": Unserved((), f"{_STATELESS}; send the earlier items in 'input'"),
        "prompt": Unserved((), f"{_STATELESS}, templates neither; send 'instructions' and 'input'"),
        "context_management": Unserved(([],)),
        "moderation": Unserved(),
        "max_tokens": Unserved((), "send 'max_output_tokens'"),
        "max_completion_tokens": Unserved((), "send 'max_output_tokens'"),
        "response_format": Unserved((), "send 'text.format'"),
        "messages": Unserved((), "send 'input'"),
        "n": Unserved((1,), _ONE_ANSWER),
        "best_of": Unserved((1,), _ONE_ANSWER),
        "return_token_ids": Unserved(
            (False,), "a response has no token ids; omit it, or use /v1/chat/completions"
        ),
        "prompt_logprobs": Unserved((), "a response has no log-probabilities of its input"),
        "truncate_prompt_tokens": Unserved((), 'send truncation="auto"'),
        "truncation_side": Unserved((), "truncation drops the oldest tokens"),
        "previous_input_messages": Unserved((), "send them in 'input'"),
        "enable_response_messages": Unserved((False,)),
    }
    input: InputItems = Field(description="A text, or items of a conversation.")
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: int | None = Field(
        None, ge=1, le=UINT32_MAX, description="Maximum number of new tokens."
    )
    tools: ResponseTools = Field(
        default_factory=list, description="Functions that the model may call; other tools are skipped."
    )
    tool_choice: ResponseToolChoice = Field(None, description='Omitted: "auto".')
    parallel_tool_calls: bool = Field(True, description="Whether an answer may have more than one call.")
    max_tool_calls: int | None = Field(
        None, ge=0, description="Ignored: it bounds calls that OpenAI's servers make."
    )
    text: TextOptions | None = Field(None, description="The form of the answer's text.")
    reasoning: ReasoningOptions | None = Field(None, description="Options of the thinking.")
    include: list[Annotated[str, Field(max_length=64)]] | None = Field(
        None,
        max_length=32,
        fail_fast=True,
        description=f"{_LOGPROBS} adds log-probabilities; other values add nothing.",
    )
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=limits.MAX_LOGPROBS,
        description=f"With {_LOGPROBS}: also this many of the likeliest tokens in each place.",
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: an input that is too long loses its oldest tokens."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Further variables for the model's chat template."
    )
    include_reasoning: bool = Field(True, description="Whether the answer includes the model's thinking.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream=true.")
    store: bool | None = Field(None, description="Ignored: nothing is stored.")
    metadata: Annotated[
        dict[str, str] | None, AfterValidator(lambda value: value and _bounded_metadata(value))
    ] = Field(None, description="The answer repeats it.")
    prompt_cache_key: Label = Field(None, description="Ignored: equal prefixes are always shared.")
    safety_identifier: Label = Field(None, description="Ignored.")
    service_tier: Label = Field(None, description="Ignored: there is one tier.")

    @model_validator(mode="after")
    def _choice_names_functions(self) -> "ResponsesRequest":
        choice, names = self.tool_choice, {tool.name for tool in self.functions}
        match choice:
            case NamedChoice(name) if name not in names:
                raise ValueError(
                    f"tool_choice names '{clip(name)}', which is not among the functions in 'tools'"
                )
            case Allowed(_, allowed) if unknown := [name for name in allowed if name not in names]:
                raise ValueError(
                    f"tool_choice allows '{clip(unknown[0])}', which is not among the functions in 'tools'"
                )
            case Allowed("required", allowed) if not allowed:
                raise ValueError("tool_choice requires a call, but allows no function")
            case "required" if not names:
                raise ValueError("tool_choice requires a call, but there is no function in 'tools'")
        return self

    @model_validator(mode="after")
    def _one_constraint_of_the_text(self) -> "ResponsesRequest":
        if self.text_format.type != "text" and self.structured_outputs is not None:
            raise ValueError("structured_outputs and text.format both constrain the answer; send one")
        return self

    @property
    def functions(self) -> list[FunctionTool]:
        """The callable tools."""
        return functions_of(self.tools)

    @property
    def skipped_tools(self) -> list[str]:
        """The types of the other tools."""
        flat = [
            one for tool in self.tools for one in (tool.tools if isinstance(tool, Namespace) else (tool,))
        ]
        return [tool.type for tool in flat if isinstance(tool, SkippedTool)]

    @property
    def text_format(self) -> TextFormat:
        """The form of the answer's text."""
        given = self.text.format if self.text is not None else None
        return given or TextFormat(type="text")

    @property
    def output_limit(self) -> int | None:
        """Maximum number of new tokens; ``None``: as many as fit into the context."""
        return self.max_output_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report with each new token; ``None``: no log-probabilities."""
        return (self.top_logprobs or 0) if _LOGPROBS in (self.include or ()) else None


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
    """A call of a function."""

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
