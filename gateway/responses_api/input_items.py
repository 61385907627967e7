"""The items of a request's input.

Items of OpenAI's own tools are read in the form of served items: a call becomes a call of a function, its
output that call's result. A line of text stands for any other item.
"""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo

from gateway.schemas.base import RequestModel, ignore, omitted, quote
from gateway.schemas.chat import MAX_MESSAGES
from gateway.schemas.tools import MAX_ARGUMENTS, arguments_of

Item = dict[str, Any]
Words = str
"""A line within the assistant's turn."""


def in_served_form(kind: str, item: Item) -> Item | Words:
    """Returns a served item, or words of the assistant, in place of an item; unknown items stay."""
    convert = _FORMS.get(kind)
    return item if convert is None else convert(item)


def _call(name: str, field: str) -> Callable[[Item], Item]:
    """Returns a converter of calls with the arguments in ``field``."""
    return lambda item: {
        "type": "function_call",
        "call_id": _call_id(item),
        "name": name,
        "arguments": _json(item.get(field)),
    }


def _custom_call(item: Item) -> Item:
    given = item.get("input")
    arguments = arguments_of(given) if isinstance(given, str) else given
    kept: Item = {name: item[name] for name in ("call_id", "name", "namespace") if name in item}
    return {"type": "function_call", "arguments": arguments, **kept}


def _output(item: Item) -> Item:
    output = item.get("output")
    if isinstance(output, dict):
        output = [output]
    if isinstance(output, list):
        output = [part for each in output for part in _parts(each)]
    elif not isinstance(output, str):
        output = _field(item, "status") or "completed"
    return {"type": "function_call_output", "call_id": _call_id(item), "output": output}


def _parts(output: Any) -> list[Any]:
    if not isinstance(output, dict) or "type" in output:
        return [output]
    streams = (_field(output, "stdout"), _field(output, "stderr"))
    outcome = output.get("outcome")
    code = outcome.get("exit_code") if isinstance(outcome, dict) else None
    ended = f"exit code {code}" if isinstance(code, int) and code else ""
    return [{"type": "text", "text": text} for text in (*streams, ended) if text]


def _tool_search(item: Item) -> Item | Words:
    return _call("tool_search", "arguments")(item) if _call_id(item) else omitted("tool search")


def _tools_found(item: Item) -> Item | Words:
    if not _call_id(item):
        return omitted("tools found")
    return {"type": "function_call_output", "call_id": _call_id(item), "output": omitted("tools found")}


def _user(words: Callable[[Item], str]) -> Callable[[Item], Item]:
    return lambda item: {"type": "message", "role": "user", "content": words(item)}


def _web_search(item: Item) -> Words:
    action = item.get("action")
    texts = [_field(action, name) for name in ("query", "url", "pattern")] if isinstance(action, dict) else []
    return f"[web search: {' '.join(filter(None, texts))}]" if any(texts) else omitted("web search")


def _file_search(item: Item) -> Words:
    results = item.get("results")
    texts = (
        [_field(one, "text") for one in results if isinstance(one, dict)] if isinstance(results, list) else []
    )
    queries = item.get("queries")
    asked = "; ".join(map(str, queries)) if isinstance(queries, list) else ""
    return "\n".join((f"[file search: {asked}]", *filter(None, texts)))


def _code(item: Item) -> Words:
    outputs = item.get("outputs")
    found = outputs if isinstance(outputs, list) else []
    logs = [_field(one, "logs") or omitted("image") for one in found if isinstance(one, dict)]
    return "\n".join(filter(None, (omitted("code run by OpenAI") + " " + _field(item, "code"), *logs)))


def _mcp_call(item: Item) -> Words:
    result = item.get("output") if isinstance(item.get("output"), str) else _json(item.get("error"))
    return f"[MCP call: {_field(item, 'name')} {_field(item, 'arguments')}]\n{result}"


def _approval(item: Item) -> str:
    return "[approval given]" if item.get("approve") is True else "[approval denied]"


def _omitted(kind: str, field: str = "") -> Callable[[Item], Words]:
    return lambda item: omitted(kind, item.get(field))


def _call_id(item: Item) -> Any:
    return item.get("call_id") or item.get("id")


def _field(item: Item, name: str) -> str:
    value = item.get(name)
    return value if isinstance(value, str) else ""


def _json(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise ValueError("is nested too deep; flatten it") from error


_COMPACTED: Final = _user(lambda _: omitted("compacted conversation"))

_FORMS: Final[Mapping[str, Callable[[Item], Item | Words]]] = {
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _output,
    "local_shell_call": _call("local_shell", "action"),
    "local_shell_call_output": _output,
    "shell_call": _call("shell", "action"),
    "shell_call_output": _output,
    "apply_patch_call": _call("apply_patch", "operation"),
    "apply_patch_call_output": _output,
    "computer_call": _call("computer", "action"),
    "computer_call_output": _output,
    "tool_search_call": _tool_search,
    "tool_search_output": _tools_found,
    "web_search_call": _web_search,
    "file_search_call": _file_search,
    "code_interpreter_call": _code,
    "image_generation_call": _omitted("image", "revised_prompt"),
    "mcp_call": _mcp_call,
    "mcp_list_tools": _omitted("tools of the MCP server", "server_label"),
    "mcp_approval_request": _omitted("request to approve a call of", "name"),
    "mcp_approval_response": _user(_approval),
    "program": _omitted("program"),
    "program_output": _omitted("output of a program"),
    "compaction": _COMPACTED,
    "compaction_summary": _COMPACTED,
    "context_compaction": _COMPACTED,
    "compaction_trigger": _COMPACTED,
    "additional_tools": _user(lambda _: omitted("additional tools")),
    "configuration_update": _user(lambda _: omitted("update of the configuration")),
}
"""The converter of each type of item in the openai package and in Codex."""


MAX_ITEMS: Final = MAX_MESSAGES

# Parts of all items together: checking more would delay other requests' streams.
_MAX_PARTS: Final = 4 * MAX_ITEMS

# The field that holds the text, by the type of a part.
_PARTS: Final = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}

# The fields of items that hold parts.
_LISTS: Final = ("content", "summary", "output")

# Fields of an answer's parts, which clients send back.
_ECHOED: Final = frozenset({"annotations", "logprobs"})

Id = Annotated[str, Field(min_length=1, max_length=256)]
Echoed = Annotated[str | None, Field(max_length=256, description="As an answer had it; ignored.")]


def _result(content: Any, info: ValidationInfo) -> str:
    if isinstance(content, list):
        content = [_part_in_words(part) for part in content]
    return _text(content, info)


def _part_in_words(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind in _PARTS:
        return part
    return {"type": "text", "text": omitted(kind, part.get("filename"))}


def _text(content: Any, info: ValidationInfo) -> str:
    """Returns a message's text; joins parts with line breaks, as chats do."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"must be a string or a list of parts, got {quote(content)}")  # noqa: TRY004
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        field = _PARTS.get(kind) if isinstance(kind, str) else None
        if field is None:
            raise ValueError(
                f"part {index} is not served; only parts with text ('input_text', 'output_text') are, got"
                f" {quote(kind or part)}"
            )
        if not isinstance(part.get(field), str):
            raise ValueError(f"part {index} needs '{field}', a string")  # noqa: TRY004 - pydantic's signal
        for name in part.keys() - {"type", field} - _ECHOED:
            ignore(info, name)
        texts.append(part[field])
    return "\n".join(texts)


PartsText = Annotated[
    str,
    BeforeValidator(_text, json_schema_input_type=str | list[dict[str, Any]]),
    Field(description="Text, or a list of parts of type input_text or output_text."),
]


ResultText = Annotated[
    str,
    BeforeValidator(_result, json_schema_input_type=str | list[dict[str, Any]]),
    Field(description="Text, or a list of parts; a line stands for each part without text."),
]


class InputMessage(RequestModel):
    """A turn of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: PartsText
    id: Echoed = None
    status: Echoed = None
    phase: Echoed = None


class FunctionCall(RequestModel):
    """An earlier call of the assistant."""

    type: Literal["function_call"]
    call_id: Id
    name: str = Field(min_length=1, max_length=256)
    namespace: str | None = Field(None, max_length=256, description="The function's, if it has one.")
    arguments: str = Field(max_length=MAX_ARGUMENTS, description="A JSON object, as text.")
    id: Echoed = None
    status: Echoed = None


class FunctionCallOutput(RequestModel):
    """The result of an earlier call."""

    type: Literal["function_call_output"]
    call_id: Id = Field(description="The call that it answers.")
    output: ResultText
    name: str | None = Field(None, max_length=256, description="The function.")
    namespace: Echoed = None
    id: Echoed = None
    status: Echoed = None


class ReasoningText(RequestModel):
    """A piece of thinking, or of its summary."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


Pieces = Annotated[list[ReasoningText], Field(fail_fast=True)]


class ReasoningItem(RequestModel):
    """Thinking of an earlier turn."""

    type: Literal["reasoning"]
    content: Pieces | None = Field(None, description="The thinking.")
    summary: Pieces | None = Field(None, description="Stands in for the thinking if there is none.")
    id: Echoed = None
    status: Echoed = None

    @property
    def text(self) -> str:
        """The thinking; empty if only an encrypted form is given."""
        return "\n".join(piece.text for piece in self.content or self.summary or ())


class Aside(NamedTuple):
    """Words of the assistant in place of an unreadable item."""

    text: str


InputItem = InputMessage | FunctionCall | FunctionCallOutput | ReasoningItem | Aside

_KINDS: Final[Mapping[str, type[InputMessage | FunctionCall | FunctionCallOutput | ReasoningItem]]] = {
    "message": InputMessage,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "reasoning": ReasoningItem,
}


def _item(value: Any, info: ValidationInfo) -> InputItem:
    if not isinstance(value, dict):
        raise ValueError(f"must be an item (a JSON object), got {quote(value)}")  # noqa: TRY004
    kind = value.get("type")
    if kind is None:
        # OpenAI's clients may send a reference without its type.
        kind = "item_reference" if value.keys() - {"type"} == {"id"} else "message"
        value = {**value, "type": kind}
    if kind == "item_reference":
        raise ValueError(
            "is not supported: nothing is stored that an item_reference could name; send the item itself, as"
            " most clients do with store=false"
        )
    if isinstance(kind, str) and kind not in _KINDS:
        value = in_served_form(kind, value)
        if isinstance(value, str):
            return Aside(value)
        kind = value["type"]
    model = _KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise ValueError(
            f"is not supported: its type is {quote(kind)}; send messages, calls and their outputs"
        )
    return model.model_validate(value, context=info.context)


def _items(value: Any) -> Any:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise ValueError(f"must be a string or a list of items, got {quote(value)}")  # noqa: TRY004
    # Checked before the items themselves.
    if len(value) > MAX_ITEMS:
        raise ValueError(f"takes at most {MAX_ITEMS} items, got {len(value)}; shorten the conversation")
    fields = (item.get(name) for item in value if isinstance(item, dict) for name in _LISTS)
    count = sum(len(parts) for parts in fields if isinstance(parts, list))
    if count > _MAX_PARTS:
        raise ValueError(f"has {count} parts; send at most {_MAX_PARTS}")
    return value


InputItems = Annotated[
    list[Annotated[InputItem, PlainValidator(_item, json_schema_input_type=InputItem)]],
    Field(min_length=1, fail_fast=True),
    BeforeValidator(_items, json_schema_input_type=str | list[InputItem]),
]
