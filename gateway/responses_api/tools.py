"""The tools of a request, and the choice among them.

A custom tool is a function with one text. OpenAI's own tools (web search, computer use, MCP servers, …) are
skipped: agents send them with every request, whether the model can use them or not. Agents group the
functions of an MCP server in a namespace; the model knows such a function by both names together.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, ValidationInfo

from gateway.quoting import clip, quote
from gateway.schemas.base import RequestModel
from gateway.schemas.sampling import or_default
from gateway.schemas.tools import MAX_TOOLS, Function, NamedChoice, ToolName, bounded
from gateway.tools.custom_tools import INPUT_SCHEMA, describe

_TYPE: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")

MODES: Final = ("none", "auto", "required")


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class CustomTool(RequestModel):
    """A tool that the model calls with a plain text."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: Annotated[
        dict[str, Any] | None, Field(description="A grammar of the text is shown to the model, not enforced.")
    ] = None

    def as_function(self, name: str) -> FunctionTool:
        """Returns the function that stands for it, under the name that the model knows."""
        description = describe(self.description, self.format)
        return FunctionTool(type="function", name=name, description=description, parameters=INPUT_SCHEMA)


class SkippedTool(NamedTuple):
    """A tool that no model can call here."""

    type: str


CallableTool = FunctionTool | CustomTool


def _callable(value: Any, info: ValidationInfo) -> CallableTool | SkippedTool:
    """Reads the definition of a function or a custom tool; of any other tool only the type."""
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
    """Returns the name that the model knows a function by."""
    return f"{namespace}__{name}" if namespace else name


class Namespace(RequestModel):
    """A group of functions."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[
        list[Annotated[CallableTool | SkippedTool, PlainValidator(_callable)]], Field(fail_fast=True)
    ]

    @property
    def functions(self) -> list[tuple[str, CallableTool]]:
        """Its functions, each with the name that the model knows."""
        return [
            (full_name(self.name, tool.name), tool) for tool in self.tools if isinstance(tool, CallableTool)
        ]


ResponseTool = FunctionTool | CustomTool | Namespace | SkippedTool


def _tool(value: Any, info: ValidationInfo) -> ResponseTool:
    if isinstance(value, dict) and value.get("type") == "namespace":
        return Namespace.model_validate(value, context=info.context)
    return _callable(value, info)


class ScopedName(NamedTuple):
    """The name that the client knows a function by."""

    name: str
    namespace: str | None = None
    custom: bool = False


def _callables(tools: Sequence[ResponseTool]) -> Iterator[tuple[str, CallableTool, str | None]]:
    """Yields the tools that the model may call: its name for them, the tool, and the namespace."""
    for tool in tools:
        if isinstance(tool, CallableTool):
            yield tool.name, tool, None
        elif isinstance(tool, Namespace):
            yield from ((name, function, tool.name) for name, function in tool.functions)


def functions_of(tools: Sequence[ResponseTool]) -> list[FunctionTool]:
    """Returns the tools that the model may call, under the names that it knows."""
    return [
        tool.as_function(name) if isinstance(tool, CustomTool) else tool.model_copy(update={"name": name})
        for name, tool, _ in _callables(tools)
    ]


def scoped_names(tools: Sequence[ResponseTool]) -> dict[str, ScopedName]:
    """Returns the client's names of tools by the names that the model knows."""
    return {
        name: ScopedName(tool.name, namespace, isinstance(tool, CustomTool))
        for name, tool, namespace in _callables(tools)
    }


def skipped_types(tools: Sequence[ResponseTool]) -> list[str]:
    """Returns the types of the tools that the model cannot call."""
    flat = [one for tool in tools for one in (tool.tools if isinstance(tool, Namespace) else (tool,))]
    return [tool.type for tool in flat if isinstance(tool, SkippedTool)]


def _distinct(tools: list[ResponseTool]) -> list[ResponseTool]:
    names = [tool.name for tool in functions_of(tools)]
    if len(names) > MAX_TOOLS:
        raise ValueError(f"takes at most {MAX_TOOLS} functions, got {len(names)} with those in namespaces")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"has two functions named '{clip(twice)}'; names must differ")
    return tools


ResponseTools = Annotated[
    list[Annotated[ResponseTool, PlainValidator(_tool, json_schema_input_type=dict[str, Any])]],
    Field(fail_fast=True),
    AfterValidator(_distinct),
    BeforeValidator(bounded),
    or_default([]),
]


class Allowed(NamedTuple):
    """The choice among some of the tools."""

    mode: Literal["auto", "required"]
    names: tuple[str, ...]
    """Of functions, as the model knows them."""


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
    """Returns the model's name of a function that a choice names; the namespace may be a field of its own."""
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
