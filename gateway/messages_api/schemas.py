"""The bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from gateway.messages_api.blocks import Blocks, BlockType, TextBlocks
from gateway.quoting import clip, quote
from gateway.schemas.base import RequestModel, Unserved
from gateway.schemas.chat import MAX_MESSAGES, TEMPLATE_UNSERVED
from gateway.schemas.sampling import UINT32_MAX, ModelName, in_bounds, or_default
from gateway.schemas.structured import Schema
from gateway.schemas.tools import bounded, object_schema
from protos import limits

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
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Blocks, Field(description="Text, or a list of blocks.")]

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
    """A tool. Only custom ones are served; the others are skipped, and a header of the answer names them."""

    type: Annotated[
        str | None, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$", description="custom, or omitted.")
    ] = None
    name: Annotated[str | None, Field(max_length=128)] = None
    description: Annotated[str | None, Field(description="What the tool does, for the model.")] = None
    input_schema: Annotated[
        dict[str, Any] | None,
        BeforeValidator(object_schema),
        Field(description="JSON schema of the tool's input, of type object."),
    ] = None
    strict: Annotated[bool | None, Field(description="Enforce the schema even if the call is optional.")] = (
        None
    )

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
    """Keeps type and name of the tools that are skipped; each kind has fields of its own."""
    if not isinstance(tools, list):
        return tools
    return [
        {name: tool[name] for name in ("type", "name") if name in tool}
        if isinstance(tool, dict) and tool.get("type", _CUSTOM) not in (None, _CUSTOM)
        else tool
        for tool in tools
    ]


def _distinct(tools: list[AnthropicTool]) -> list[AnthropicTool]:
    names = [tool.name or "" for tool in tools if tool.custom]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"has two tools named '{clip(twice)}'; names must differ")
    return tools


class AnthropicToolChoice(RequestModel):
    """The choice among the tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str | None, Field(max_length=128, description="With the type tool.")] = None
    disable_parallel_tool_use: Annotated[
        bool, or_default(False), Field(description="Whether an answer has at most one call.")
    ] = False

    @model_validator(mode="after")
    def _named(self) -> "AnthropicToolChoice":
        if self.type == "tool" and not self.name:
            raise ValueError("needs 'name', because its type is 'tool'")
        return self


class ThinkingConfig(RequestModel):
    """Whether the model thinks before it answers."""

    type: Annotated[
        Literal["enabled", "disabled", "adaptive", "between_tools"],
        Field(
            description="enabled and disabled switch the thinking of chat templates that have a switch; the"
            " others leave it to the template."
        ),
    ]
    budget_tokens: Annotated[
        int | None, Field(ge=0, le=UINT32_MAX, description="Ignored: max_tokens bounds thinking and answer.")
    ] = None
    display: Annotated[
        str | None, Field(max_length=64, description="omitted: the answer has thinking blocks without text.")
    ] = None


class JsonOutput(RequestModel):
    """A JSON schema that the answer's text matches."""

    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema", description="A JSON schema.")]


class OutputConfig(RequestModel):
    """The form of the answer."""

    effort: Annotated[
        Literal["low", "medium", "high", "xhigh", "max"] | None,
        Field(description="For chat templates that know reasoning_effort."),
    ] = None
    format: Annotated[JsonOutput | None, Field(description="Constrains the answer's text.")] = None


class Metadata(RequestModel):
    """Facts about the request."""

    user_id: Annotated[
        str | None, Field(max_length=512, description="Your end user, for the access log.")
    ] = None


_ONLY_THIS_MODEL: Final = "it is not served by this deployment; omit it"


class PromptRequest(RequestModel):
    """The part of both bodies that becomes the prompt."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        **TEMPLATE_UNSERVED,
        "container": Unserved(),
        "mcp_servers": Unserved(([],), "the client must call its MCP servers itself"),
        "thread": Unserved((), "nothing is stored; send all turns in 'messages'"),
    }
    model: Annotated[ModelName, Field(description="A name from /v1/models; omitted: the served model.")] = (
        None
    )
    messages: Annotated[
        list[Turn],
        Field(
            min_length=1,
            fail_fast=True,
            description="The conversation; a last turn of the assistant is continued.",
        ),
        BeforeValidator(_limit_turns),
    ]
    system: Annotated[
        TextBlocks,
        or_default([]),
        BeforeValidator(_limit_system),
        Field(description="The system prompt."),
    ] = Field(default_factory=list)
    tools: Annotated[
        list[AnthropicTool],
        Field(fail_fast=True, description="Tools that the model may call."),
        AfterValidator(_distinct),
        BeforeValidator(bounded),
        BeforeValidator(_without_settings_of_server_tools),
        or_default([]),
    ] = Field(default_factory=list)
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[
        JsonOutput | None, Field(description="The older form of output_config.format.")
    ] = None
    chat_template_kwargs: Annotated[dict[str, Any], or_default({})] = Field(
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
        """The types of the tools that are not served."""
        return [tool.type or "" for tool in self.tools if not tool.custom]

    @property
    def schema_of_answer(self) -> dict[str, Any] | bool | None:
        """The JSON schema that the answer's text matches; ``None``: any text is fine."""
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

    max_tokens: Annotated[int, Field(ge=1, le=UINT32_MAX, description="Maximum number of new tokens.")]
    stream: Annotated[
        bool, or_default(False), Field(description="Send the answer in pieces, as server-sent events.")
    ] = False
    temperature: Annotated[
        float | None,
        in_bounds("temperature", description="0: greedy; omitted: as the model recommends."),
    ] = None
    top_p: Annotated[float | None, in_bounds("top_p", description="Nucleus sampling.")] = None
    top_k: Annotated[
        int | None, Field(ge=-1, le=2**31 - 1, description="Keep this many of the likeliest tokens.")
    ] = None
    stop_sequences: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_STRING_LENGTH)]],
        Field(max_length=limits.MAX_STOP_STRINGS, fail_fast=True, description="Texts that end the answer."),
        or_default([]),
    ] = Field(default_factory=list)
    metadata: Metadata | None = None
    priority: Annotated[int, or_default(0), Field(ge=-(2**31), le=2**31 - 1)] = 0
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=limits.MAX_NAME_BYTES)] = None

    @property
    def user(self) -> str | None:
        """The client's end user, for the access log."""
        return self.metadata.user_id if self.metadata else None
