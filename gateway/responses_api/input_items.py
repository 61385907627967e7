"""The items of a request's input.

Items of OpenAI's own tools are read in the form of served items: a call becomes a call of a function, its
output that call's result. A line of text stands for any other item.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo

from gateway.schemas.base import RequestModel, as_json, clip, ignore, omitted, quote
from gateway.schemas.chat import MAX_MESSAGES
from gateway.schemas.tools import MAX_ARGUMENTS, arguments_of

Item = dict[str, Any]

# Types of items without a call's name, by the role of the line that stands for them.
_BY_USER: Final = frozenset({
    "additional_tools", "compaction", "compaction_summary", "compaction_trigger", "configuration_update",
    "context_compaction", "mcp_approval_response",
})  # fmt: skip
_BY_MODEL: Final = frozenset(
    {"mcp_approval_request", "mcp_list_tools", "program", "program_output", "tool_search_output"}
)

# Fields with the arguments of a call, and fields that say what an item or its action did.
_ARGUMENTS: Final = ("arguments", "action", "operation")
_DONE: Final = (
    "server_label", "name", "arguments", "query", "url", "pattern", "code", "revised_prompt", "approve",
)  # fmt: skip


def in_served_form(kind: str, item: Item) -> Item | str:
    """Returns a served item, or words of the assistant, in place of an item; unknown items stay.

    A type that a later SDK brings is read by the end of its name.
    """
    call_id = item.get("call_id") or item.get("id")
    if kind == "tool_search_output" and call_id:
        return {"type": "function_call_output", "call_id": call_id, "output": omitted(kind)}
    if kind.endswith("_call_output"):
        return {"type": "function_call_output", "call_id": call_id, "output": _output(item)}
    if kind.endswith("_call") and item.get("call_id"):
        return _call(kind, item)
    if kind in _BY_USER:
        return {"type": "message", "role": "user", "content": _in_words(kind, item)}
    return _in_words(kind, item) if kind in _BY_MODEL or kind.endswith("_call") else item


def _call(kind: str, item: Item) -> Item:
    arguments: Any = next((item[name] for name in _ARGUMENTS if item.get(name) is not None), {})
    if kind == "custom_tool_call":
        given = item.get("input")
        arguments = arguments_of(given) if isinstance(given, str) else given
    elif not isinstance(arguments, str):
        arguments = as_json(arguments)
    kept: Item = {name: item[name] for name in ("call_id", "name", "namespace") if name in item}
    return {"type": "function_call", "name": kind.removesuffix("_call"), "arguments": arguments, **kept}


def _output(item: Item) -> Any:
    output = item.get("output")
    if isinstance(output, dict):
        output = [output]
    if isinstance(output, list):
        return [part for each in output for part in _parts(each)]
    return output if isinstance(output, str) else "\n".join(_texts(item, ("status",))) or "completed"


def _parts(output: Any) -> list[Any]:
    if not isinstance(output, dict) or "type" in output:
        return [output]
    outcome = output.get("outcome")
    code = outcome.get("exit_code") if isinstance(outcome, dict) else None
    ended = [f"exit code {code}"] if isinstance(code, int) and code else []
    known = {"stdout", "stderr", "outcome"} & output.keys()
    texts = [*_texts(output, ("stdout", "stderr")), *ended] if known else [as_json(output)]
    return [{"type": "text", "text": text} for text in texts]


def _in_words(kind: str, item: Item) -> str:
    """Returns what an item did, and the text that came of it."""
    action = item.get("action")
    done = [*_texts(item, _DONE), *_texts(action, _DONE)]
    # A search has its query also in a list.
    done = done or [*_texts(item, ("queries",)), *_texts(action, ("queries",))]
    results = [*_texts(item, ("output", "error")), *_texts(item.get("results"), ("text",))]
    results += _texts(item.get("outputs"), ("logs",))
    results += [omitted("image")] * sum(kind == "image" for kind in _texts(item.get("outputs"), ("type",)))
    words = clip(kind).removesuffix("_call").replace("_", " ")
    return "\n".join((f"[{words}: {' '.join(done)}]" if done else omitted(kind), *results))


def _texts(value: Any, names: Iterable[str]) -> list[str]:
    """Returns the fields of an object, or of each object in a list, as text."""
    objects = value if isinstance(value, list) else [value]
    return [
        _text_of(each[name])
        for each in objects
        if isinstance(each, dict)
        for name in names
        if each.get(name) not in (None, "", [])
    ]


def _text_of(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return "; ".join(value)
    return value if isinstance(value, str) else as_json(value)


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
