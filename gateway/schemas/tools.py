"""Tools in a chat request: callable functions, the choice among them, and calls of earlier turns.

Sizes are checked before contents: ten thousand tools cost no more than ten.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple

import orjson
from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from gateway.schemas.base import RequestModel, Unserved, clip, quote
from gateway.schemas.structured import map_schemas, refuse_foreign_references

INPUT_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def describe(description: str | None, form: dict[str, Any] | None) -> str | None:
    """Returns a custom tool's description, with the grammar of its input, if any."""
    grammar = (form or {}).get("grammar", form or {})
    definition = grammar.get("definition") if isinstance(grammar, dict) else None
    if not isinstance(definition, str):
        return description
    syntax = grammar.get("syntax")
    kind = "regular expression" if syntax == "regex" else "Lark grammar"
    return "\n\n".join(filter(None, (description, f"The input matches this {kind}:\n{definition}")))


def arguments_of(text: str) -> str:
    """Returns the arguments of a call with the input ``text``."""
    return json.dumps({"input": text}, ensure_ascii=False)


MAX_TOOLS: Final = 128

# Calls in one earlier turn.
MAX_CALLS: Final = 128

# Levels of nesting in one tool's schema, and values of all kinds in all tools of a request.
MAX_SCHEMA_DEPTH: Final = 64
MAX_SCHEMA_VALUES: Final = 16_384
# Characters in all tools of a request.
MAX_TOOLS_TEXT: Final = 512 * 1024
# Characters in the arguments of one earlier call.
MAX_ARGUMENTS: Final = 1024 * 1024

FUNCTIONS_HINT: Final = "it is OpenAI's older form; send 'tools' and 'tool_choice'"

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def _name(value: Any) -> Any:
    if isinstance(value, str) and _NAME.fullmatch(value) is None:
        raise ValueError(f"must be 1 to 64 letters, digits, '_', '-' or '.', got {quote(value)}")
    return value


ToolName = Annotated[str, BeforeValidator(_name)]


def bounded(tools: Any) -> Any:
    """Refuses too many, too large or too deep tools, with bounded effort."""
    if not isinstance(tools, list):
        return tools
    if len(tools) > MAX_TOOLS:
        raise ValueError(f"takes at most {MAX_TOOLS} tools, got {len(tools)}")
    values = chars = 0
    waiting: list[tuple[Any, int]] = [(tools, 0)]
    while waiting:
        value, depth = waiting.pop()
        values += 1
        if isinstance(value, str):
            chars += len(value)
        elif isinstance(value, dict | list):
            # The list, the tool and its function surround the schema.
            if depth > MAX_SCHEMA_DEPTH + 3:
                raise ValueError(f"is nested deeper than {MAX_SCHEMA_DEPTH} levels; flatten the schemas")
            if values + len(value) > MAX_SCHEMA_VALUES:
                raise ValueError(f"has more than {MAX_SCHEMA_VALUES} values; send fewer or smaller tools")
            if isinstance(value, dict):
                chars += sum(map(len, value))
                waiting.extend((item, depth + 1) for item in value.values())
            else:
                waiting.extend((item, depth + 1) for item in value)
        if values > MAX_SCHEMA_VALUES:
            raise ValueError(f"has more than {MAX_SCHEMA_VALUES} values; send fewer or smaller tools")
        if chars > MAX_TOOLS_TEXT:
            raise ValueError(f"has more than {MAX_TOOLS_TEXT} characters; shorten the descriptions")
    return tools


NO_PARAMETERS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a tool that takes nothing."""

# Keywords of an object's schema that say nothing about its properties.
_ANNOTATIONS: Final = frozenset({
    "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "examples", "strict", "title",
    "type",
})  # fmt: skip
# Keywords of which null is a value.
_MAY_BE_NULL: Final = frozenset({"const", "default"})


def _without_nulls(schema: Any) -> Any:
    """Returns a schema without null keywords, which many MCP servers write for absent keywords."""
    if schema is None:
        return {}
    if isinstance(schema, list):
        schema = [item for item in schema if item is not None]
    if isinstance(schema, dict):
        schema = {name: value for name, value in schema.items() if value is not None or name in _MAY_BE_NULL}
    return map_schemas(schema, _without_nulls)


def object_schema(value: Any) -> Any:
    """Drops a schema's nulls; refuses a schema that no object can match, or that refers to another."""
    value = value and _without_nulls(value)
    refuse_foreign_references(value)
    if isinstance(value, dict) and value.get("type", "object") != "object":
        raise ValueError(
            f'must be the schema of an object ("type": "object"), got "type": {quote(value["type"])}'
        )
    return value


class Function(RequestModel):
    """The definition of a tool."""

    name: ToolName
    description: str | None = Field(None, description="What the function does, for the model.")
    parameters: Annotated[dict[str, Any] | None, BeforeValidator(object_schema)] = Field(
        None, description="JSON schema of the arguments, of type object; omitted: no parameters."
    )
    strict: bool | None = Field(None, description="Enforce the schema even if the call is optional.")

    @property
    def has_no_parameters(self) -> bool:
        """Whether the function takes nothing: its schema allows the empty object and names no property."""
        schema = {name: value for name, value in (self.parameters or {}).items() if name not in _ANNOTATIONS}
        is_open = schema.pop("additionalProperties", False) is not False
        return not is_open and not any(schema.values())


def _function_only(value: Any) -> Any:
    if value != "function":
        raise ValueError(f"{quote(value)} is not served; only tools of type 'function' or 'custom' are")
    return value


def _custom_part(value: Any) -> dict[str, Any] | None:
    """Returns the definition, choice or call of a custom tool; ``None`` for anything else."""
    if not isinstance(value, dict) or value.get("type") != "custom":
        return None
    part = value.get("custom")
    if not isinstance(part, dict):
        raise ValueError("needs 'custom', an object, because its type is 'custom'")  # noqa: TRY004
    if not isinstance(part.get("name"), str):
        raise ValueError("needs custom.name, a string")  # noqa: TRY004
    return part


def _tool_as_function(value: Any) -> Any:
    if (custom := _custom_part(value)) is None:
        return value
    form = custom.get("format")
    if not isinstance(form, dict | None):
        raise ValueError(f"needs an object as custom.format, got {quote(form)}")  # noqa: TRY004
    function = {"description": describe(custom.get("description"), form), "parameters": INPUT_SCHEMA}
    return {"type": "function", "function": {"name": custom["name"], **function}}


def _call_as_function(value: Any) -> Any:
    if (custom := _custom_part(value)) is None:
        return value
    if not isinstance(text := custom.get("input"), str):
        raise ValueError("needs custom.input, a string")  # noqa: TRY004
    others = {name: item for name, item in value.items() if name != "custom"}
    function = {"name": custom["name"], "arguments": arguments_of(text)}
    return {**others, "type": "function", "function": function}


FunctionType = Annotated[Literal["function"], BeforeValidator(_function_only)]


class Tool(RequestModel):
    """A function that the model may call."""

    type: FunctionType = "function"
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Returns the tool in the form that chat templates expect."""
        return {
            "type": "function",
            "function": self.function.model_dump(exclude_unset=True, exclude_none=True),
        }


def check_distinct(names: Sequence[str]) -> None:
    """Refuses tools with the same name."""
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"has two tools named '{clip(twice)}'; names must differ")


def _distinct(tools: list[Tool]) -> list[Tool]:
    check_distinct([tool.function.name for tool in tools])
    return tools


class NamedChoice(NamedTuple):
    """The choice of a single tool."""

    name: str


class Allowed(NamedTuple):
    """The choice among some of the tools."""

    mode: Literal["auto", "required"]
    names: tuple[str, ...]
    """The model's names of functions."""


_CHOICES: Final = ("none", "auto", "required")


def _choice(value: Any) -> Any:
    if value is None or value in _CHOICES:
        return value
    if (name := _chosen(value)) is not None:
        return NamedChoice(name)
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        allowed = value.get("allowed_tools")
        tools = allowed.get("tools") if isinstance(allowed, dict) else None
        names = [_chosen(tool) for tool in tools] if isinstance(tools, list) else [None]
        known = tuple(name for name in names if name is not None)
        if (
            isinstance(allowed, dict)
            and allowed.get("mode") in ("auto", "required")
            and len(known) == len(names)
        ):
            return Allowed(allowed["mode"], known)
    raise ValueError(
        'must be "none", "auto", "required", {"type": "function", "function": {"name": "…"}} or'
        ' {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": […]}},'
        f" got {quote(value)}"
    )


def _chosen(value: Any) -> str | None:
    """Returns the name of a chosen function or custom tool."""
    if not isinstance(value, dict) or (kind := value.get("type")) not in ("function", "custom"):
        return None
    given = {name: item for name, item in value.items() if item is not None}
    function = value.get(kind) if given.keys() <= {"type", kind} else None
    if isinstance(function, dict) and function.keys() == {"name"} and isinstance(function["name"], str):
        return function["name"]
    return None


Tools = Annotated[
    list[Annotated[Tool, BeforeValidator(_tool_as_function)]],
    Field(fail_fast=True),
    AfterValidator(_distinct),
    BeforeValidator(bounded),
]
ToolChoice = Annotated[
    Allowed | NamedChoice | Literal["none", "auto", "required"] | None,
    PlainValidator(_choice, json_schema_input_type=str | dict[str, Any] | None),
]


def _as_text(arguments: Any) -> Any:
    """Writes arguments that are an object, as some clients send them, as text."""
    if not isinstance(arguments, dict):
        return arguments
    try:
        return orjson.dumps(arguments).decode()
    except orjson.JSONEncodeError as error:
        raise ValueError("is nested too deep; flatten it") from error


class EarlierFunction(RequestModel):
    """The name and arguments of an earlier call."""

    # Any name: a model may have made it up, and refusing it would end the conversation.
    name: str = Field(min_length=1, max_length=256)
    arguments: Annotated[
        str | None,
        Field(max_length=MAX_ARGUMENTS),
        BeforeValidator(_as_text, json_schema_input_type=str | dict[str, Any] | None),
    ] = Field(None, description="A JSON object, usually as text.")


class EarlierCall(RequestModel):
    """A call in an earlier turn of the assistant."""

    # Streams carry it, so clients that collect a stream send it back.
    unserved: ClassVar[Mapping[str, Unserved]] = {"index": Unserved(tuple(range(MAX_CALLS)))}

    id: str = Field(min_length=1, max_length=256, description="The call's id.")
    type: FunctionType = "function"
    function: EarlierFunction

    def for_template(self) -> dict[str, Any]:
        """Returns the call in the form that chat templates expect.

        Arguments are an object; an empty one if the model's text was not an object, as in vLLM.
        """
        try:
            arguments = orjson.loads(self.function.arguments or "{}")
        except orjson.JSONDecodeError:
            arguments = None
        if not isinstance(arguments, dict):
            arguments = {}
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


EarlierCalls = Annotated[
    list[Annotated[EarlierCall, BeforeValidator(_call_as_function)]], Field(fail_fast=True)
]


def limit_calls(calls: Any) -> Any:
    """Refuses an excessive number of calls before looking at them."""
    if isinstance(calls, list) and len(calls) > MAX_CALLS:
        raise ValueError(f"takes at most {MAX_CALLS} calls, got {len(calls)}")
    return calls
