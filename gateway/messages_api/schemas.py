"""The bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``, and the answers."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Required

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from typing_extensions import TypedDict

from gateway.schemas.base import RequestModel, Unserved, as_json, clip, omitted, quote
from gateway.schemas.chat import MAX_MESSAGES, TEMPLATE_UNSERVED
from gateway.schemas.sampling import UINT32_MAX, ModelName, in_bounds
from gateway.schemas.structured import Schema
from gateway.schemas.tools import bounded, check_distinct, object_schema
from protos import limits

BlockType = Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]

# The fields that each type of block must have.
_NEEDED: Final[Mapping[BlockType, tuple[str, ...]]] = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}


# Blocks of other tools and files, which are read as text. An image is one only within a result: a user's turn
# with an image asks about it, which no model here can answer.
_IN_WORDS: Final = frozenset({
    "advisor_tool_result", "bash_code_execution_tool_result", "browser_state", "code_execution_tool_result",
    "compaction", "container_upload", "document", "fallback", "mcp_tool_listing", "mcp_tool_result",
    "mcp_tool_use", "search_result", "server_tool_use", "text_editor_code_execution_tool_result",
    "tool_addition", "tool_reference", "tool_removal", "tool_search_tool_result", "web_fetch_tool_result",
    "web_search_tool_result",
})  # fmt: skip
_IN_RESULTS: Final = _IN_WORDS | {"image"}

_CALLS: Final = frozenset({"server_tool_use", "mcp_tool_use"})
# Fields of blocks with text, or with blocks that have it, in the order of reading.
_TEXTS: Final = (
    "title",
    "context",
    "url",
    "text",
    "stdout",
    "stderr",
    "error_code",
    "source",
    "data",
    "content",
)
# Deeper blocks than any of Anthropic's.
_MAX_DEPTH: Final = 6


def _in_words(block: Mapping[str, Any]) -> dict[str, Any]:
    kind = block["type"]
    if kind in _CALLS:
        text = f"[{clip(str(block.get('name')))} was called with {as_json(block.get('input'))}]"
    else:
        text = "\n".join(_texts(block, 0)) or omitted(kind)
    return {"type": "text", "text": text}


def _texts(value: Any, depth: int) -> Iterator[str]:
    """Yields the texts in a block; files and images are named instead of shown."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list) and depth < _MAX_DEPTH:
        for item in value:
            yield from _texts(item, depth + 1)
    elif isinstance(value, dict) and depth < _MAX_DEPTH:
        kind = value.get("type")
        if kind in ("base64", "url", "file"):
            return
        if kind in ("image", "document") and not any(_texts(value.get("source"), depth + 1)):
            yield omitted(kind, value.get("title"))
            value = {"context": value.get("context")}
        for name in _TEXTS:
            yield from _texts(value.get(name), depth + 1)


def _blocks(*types: str, in_words: frozenset[str] = frozenset()) -> Callable[[Any], Any]:
    """Returns a validator of text and blocks of ``types``; blocks of ``in_words`` become text."""

    def check(content: Any) -> Any:
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise ValueError(f"must be a string or a list of blocks, got {quote(content)}")  # noqa: TRY004
        found = []
        for index, block in enumerate(content):
            kind = block.get("type") if isinstance(block, dict) else None
            if isinstance(kind, str) and kind in in_words:
                found.append(_in_words(block))
            elif kind in types:
                found.append(block)
            else:
                raise ValueError(
                    f"block {index} is not served; only blocks of type {_listed(types)} are, got"
                    f" {quote(kind or block)}"
                )
        return found

    return check


def _listed(types: tuple[str, ...]) -> str:
    names = [f"'{name}'" for name in types]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


class TextBlock(RequestModel):
    """Text."""

    type: Literal["text"]
    text: str


TextBlocks = Annotated[
    list[TextBlock],
    Field(fail_fast=True),
    BeforeValidator(_blocks("text"), json_schema_input_type=str | list[TextBlock]),
]
ResultBlocks = Annotated[
    list[TextBlock],
    Field(fail_fast=True),
    BeforeValidator(_blocks("text", in_words=_IN_RESULTS), json_schema_input_type=str | list[TextBlock]),
]


class Block(RequestModel):
    """A block of a turn's content, with the fields of its type."""

    type: BlockType
    text: str | None = Field(None, description="With the type text.")
    thinking: str | None = Field(None, description="With the type thinking: thinking of an earlier turn.")
    signature: str | None = Field(None, description="With the type thinking; not verified.")
    data: str | None = Field(None, description="With the type redacted_thinking; not read.")
    id: str | None = Field(
        None, min_length=1, max_length=256, description="With the type tool_use: the call's id."
    )
    name: str | None = Field(
        None, min_length=1, max_length=256, description="With the type tool_use: the tool."
    )
    input: dict[str, Any] | None = Field(None, description="With the type tool_use: the call's arguments.")
    tool_use_id: str | None = Field(
        None, min_length=1, max_length=256, description="With the type tool_result: the call's id."
    )
    content: ResultBlocks = Field(
        default_factory=list,
        description="With the type tool_result. Texts of documents count; a line stands for an image.",
    )
    is_error: bool = Field(False, description="With the type tool_result: whether the call failed.")

    @model_validator(mode="after")
    def _complete(self) -> "Block":
        for name in _NEEDED[self.type]:
            if getattr(self, name) is None:
                raise ValueError(f"needs '{name}', because its type is '{self.type}'")
        return self


Blocks = Annotated[
    list[Block],
    Field(fail_fast=True),
    BeforeValidator(
        _blocks("text", "thinking", "redacted_thinking", "tool_use", "tool_result", in_words=_IN_WORDS),
        json_schema_input_type=str | list[Block],
    ),
]


# Blocks in all turns and results of calls together, and in a system prompt: checking more would delay other
# requests' streams.
_MAX_BLOCKS: Final = 4 * MAX_MESSAGES

_TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")

_CUSTOM: Final = "custom"

# The blocks that each role may have.
_ROLES: Final[Mapping[str, frozenset[BlockType]]] = {
    "user": frozenset({"text", "tool_result"}),
    "assistant": frozenset({"text", "thinking", "redacted_thinking", "tool_use"}),
    "system": frozenset({"text"}),
}


class Turn(RequestModel):
    """A turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks = Field(description="Text, or a list of blocks.")

    @model_validator(mode="after")
    def _blocks_belong_to_roles(self) -> "Turn":
        for index, block in enumerate(self.content):
            if block.type not in _ROLES[self.role]:
                raise ValueError(
                    f"content[{index}] has the type '{block.type}', which turns of the role '{self.role}' do not"
                    " have; send it with another role"
                )
        return self


def _limit_turns(turns: Any) -> Any:
    # Checked before the turns themselves.
    if not isinstance(turns, list):
        return turns
    if len(turns) > MAX_MESSAGES:
        raise ValueError(f"takes at most {MAX_MESSAGES} messages, got {len(turns)}; shorten the conversation")
    blocks = [block for turn in turns for block in _content_of(turn)]
    _check_count(len(blocks) + sum(len(_content_of(block)) for block in blocks))
    return turns


def _content_of(value: Any) -> list[Any]:
    content = value.get("content") if isinstance(value, dict) else None
    return content if isinstance(content, list) else []


def _check_count(count: int) -> None:
    if count > _MAX_BLOCKS:
        raise ValueError(f"has {count} blocks; send at most {_MAX_BLOCKS}")


def _limit_system(system: Any) -> Any:
    if isinstance(system, list):
        _check_count(len(system))
    return system


class AnthropicTool(RequestModel):
    """A tool. Custom tools are served; others are skipped and named in a header of the answer."""

    type: str | None = Field(None, pattern=r"^[A-Za-z0-9_.-]{1,128}$", description="custom, or omitted.")
    name: str | None = Field(None, max_length=128)
    description: str | None = Field(None, description="What the tool does, for the model.")
    input_schema: Annotated[dict[str, Any] | None, BeforeValidator(object_schema)] = Field(
        None, description="JSON schema of the tool's input, of type object."
    )
    strict: bool | None = Field(None, description="Enforce the schema even if the call is optional.")

    @property
    def custom(self) -> bool:
        """Whether the client runs the tool and describes it."""
        return self.type in (None, _CUSTOM)

    @model_validator(mode="after")
    def _custom_tools_are_described(self) -> "AnthropicTool":
        if not self.custom:
            return self
        if self.name is None or _TOOL_NAME.fullmatch(self.name) is None:
            raise ValueError(
                f"name must be 1 to 128 letters, digits, '_', '-' or '.', got {quote(self.name)}"
            )
        if self.input_schema is None:
            raise ValueError("needs 'input_schema', the JSON schema of the tool's input")
        return self


def _without_settings_of_server_tools(tools: Any) -> Any:
    if not isinstance(tools, list):
        return tools
    return [
        {name: tool[name] for name in ("type", "name") if name in tool}
        if isinstance(tool, dict) and tool.get("type", _CUSTOM) not in (None, _CUSTOM)
        else tool
        for tool in tools
    ]


def _distinct(tools: list[AnthropicTool]) -> list[AnthropicTool]:
    check_distinct([tool.name or "" for tool in tools if tool.custom])
    return tools


class AnthropicToolChoice(RequestModel):
    """The choice among the tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, max_length=128, description="With the type tool.")
    disable_parallel_tool_use: bool = Field(False, description="Whether an answer has at most one call.")

    @model_validator(mode="after")
    def _named(self) -> "AnthropicToolChoice":
        if self.type == "tool" and not self.name:
            raise ValueError("needs 'name', because its type is 'tool'")
        return self


class ThinkingConfig(RequestModel):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"] = Field(
        description="enabled and disabled switch the thinking of chat templates that have a switch; the"
        " others leave it to the template."
    )
    budget_tokens: int | None = Field(
        None,
        ge=0,
        le=UINT32_MAX,
        description="Most tokens of a thought, with the type enabled. 0: none. Models that do not think ignore it.",
    )
    display: str | None = Field(
        None, max_length=64, description="omitted: the answer has thinking blocks without text."
    )


class JsonOutput(RequestModel):
    """A JSON schema of the answer's text."""

    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema", description="A JSON schema.")


class OutputConfig(RequestModel):
    """The form of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="For chat templates that know reasoning_effort."
    )
    format: JsonOutput | None = Field(None, description="Constrains the answer's text.")


class Metadata(RequestModel):
    """Facts about the request."""

    user_id: str | None = Field(None, max_length=512, description="Your end user, for the access log.")


class PromptRequest(RequestModel):
    """The fields of both bodies for the prompt."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        **TEMPLATE_UNSERVED,
        "container": Unserved(),
        "mcp_servers": Unserved(([],), "the client must call its MCP servers itself"),
        "thread": Unserved((), "nothing is stored; send all turns in 'messages'"),
    }
    model: ModelName = Field(None, description="A name from /v1/models; omitted: the served model.")
    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True), BeforeValidator(_limit_turns)] = (
        Field(description="The conversation; a last turn of the assistant is continued.")
    )
    system: Annotated[TextBlocks, BeforeValidator(_limit_system)] = Field(
        default_factory=list, description="The system prompt."
    )
    tools: Annotated[
        list[AnthropicTool],
        Field(fail_fast=True),
        AfterValidator(_distinct),
        BeforeValidator(bounded),
        BeforeValidator(_without_settings_of_server_tools),
    ] = Field(default_factory=list, description="Tools that the model may call.")
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutput | None = Field(None, description="The older form of output_config.format.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Further variables for the model's chat template, as with vLLM."
    )

    @model_validator(mode="after")
    def _one_format(self) -> "PromptRequest":
        config = self.output_config
        if self.output_format is not None and config is not None and config.format is not None:
            raise ValueError("output_format and output_config.format mean the same; send the second")
        return self

    @model_validator(mode="after")
    def _choice_names_a_tool(self) -> "PromptRequest":
        choice = self.tool_choice
        if choice is None or choice.type in ("auto", "none"):
            return self
        names = {tool.name for tool in self.tools if tool.custom}
        if not names:
            raise ValueError("tool_choice needs 'tools' of type 'custom': there is nothing to call")
        if choice.type == "tool" and choice.name not in names:
            raise ValueError(f"tool_choice names '{clip(choice.name or '')}', which is not among the tools")
        return self

    @property
    def skipped_tools(self) -> list[str]:
        """The types of skipped tools."""
        return [tool.type or "" for tool in self.tools if not tool.custom]

    @property
    def schema_of_answer(self) -> dict[str, Any] | bool | None:
        """The JSON schema of the answer's text; ``None``: any text."""
        asked = self.output_format or (self.output_config and self.output_config.format)
        return asked.schema_ if asked else None


class CountTokensRequest(PromptRequest):
    """A request for the number of a prompt's tokens."""


class MessagesRequest(PromptRequest):
    """A request for the assistant's next turn."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        **PromptRequest.unserved,
        "compaction": Unserved((), "ask for a summary in a turn of the user"),
    }

    max_tokens: int = Field(ge=1, le=UINT32_MAX, description="Maximum number of new tokens.")
    stream: bool = Field(False, description="Send the answer in pieces, as server-sent events.")
    temperature: float | None = in_bounds(
        "temperature", None, description="0: greedy; omitted: as the model recommends."
    )
    top_p: float | None = in_bounds("top_p", None, description="Nucleus sampling.")
    top_k: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="Keep this many of the likeliest tokens."
    )
    stop_sequences: list[Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_STRING_LENGTH)]] = (
        Field(
            default_factory=list,
            max_length=limits.MAX_STOP_STRINGS,
            fail_fast=True,
            description="Texts that end the answer.",
        )
    )
    metadata: Metadata | None = None
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    cache_salt: str | None = Field(None, min_length=1, max_length=limits.MAX_NAME_BYTES)

    @property
    def user(self) -> str | None:
        """The client's end user, for the access log."""
        return self.metadata.user_id if self.metadata else None


class AnthropicErrorDetail(TypedDict):
    """The error."""

    type: Annotated[str, Field(description="Anthropic's error type, for example invalid_request_error.")]
    message: Annotated[str, Field(description="One line: what was wrong, and what to change.")]


class AnthropicErrorAnswer(TypedDict):
    """Anthropic's error object."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: Annotated[str, Field(description="The same as the headers Request-Id and X-Request-Id.")]


class AnswerBlock(TypedDict, total=False):
    """A block of an answer, with the fields of its type."""

    type: Required[Literal["text", "thinking", "tool_use"]]
    text: Annotated[str | None, Field(description="With the type text.")]
    thinking: Annotated[str | None, Field(description="With the type thinking.")]
    signature: Annotated[str | None, Field(description="With the type thinking: send it back with it.")]
    id: Annotated[str | None, Field(description="With the type tool_use: the call's id.")]
    name: Annotated[str | None, Field(description="With the type tool_use: the tool.")]
    input: Annotated[
        dict[str, Any] | None,
        Field(description="With the type tool_use: the call's arguments; empty if max_tokens cut them off."),
    ]


class OutputTokensDetails(TypedDict):
    """Details of the answer's tokens."""

    thinking_tokens: Annotated[int, Field(description="Tokens of thinking, its markers included.")]


class TokenCounts(TypedDict):
    """Token counts. The three counts of prompt tokens add up to the prompt's length."""

    input_tokens: Annotated[int, Field(description="Prompt tokens that were computed.")]
    cache_creation_input_tokens: Annotated[int, Field(description="Always 0: caching costs nothing.")]
    cache_read_input_tokens: Annotated[int, Field(description="Prompt tokens from the prefix cache.")]
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class MessageUsage(TokenCounts):
    """Token counts of a whole message."""

    service_tier: Literal["standard"]


class MessageHead(TypedDict):
    """The first fields of a message."""

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
