"""Grammars of tool calls, written from the entry of their format, and of constrained answers.

A grammar is a structural tag: JSON in the form of xgrammar, which the worker compiles. The schema of a tool
is a separate document inside it, so references within a schema keep their meaning.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, assert_never

from gateway.parsers.formats import Elements, Format, JsonObject, LooseObject, NamedJson, Python, Tagged
from gateway.parsers.reasoning import THINK, Thinking, ThinkingFormat
from gateway.schemas.structured import closed, map_schemas
from protos.errors import InvalidArgument
from protos.triptych.v1 import common_pb2 as pb

Tag: TypeAlias = dict[str, Any]

# Keywords of JSON Schema that do not constrain values. They are removed, because long texts would use up the
# compiler's limits.
_ANNOTATIONS: Final = frozenset({"$comment", "default", "description", "examples", "title"})
_NUMBER: Final = re.compile(r"\{[01]\}")


class Callee(NamedTuple):
    """The part of a tool for a grammar."""

    name: str
    """Only letters, digits and "_.-", so JSON needs no escapes for it."""
    schema: Mapping[str, Any]
    """JSON schema of the arguments."""


def required(form: Format, tools: Sequence[Callee], *, parallel: bool) -> Tag:
    """Returns a tag for calls only: a single call, or with ``parallel`` any number."""
    return _required(form, _tags(form, tools), parallel)


def either(form: Format, tools: Sequence[Callee], answer: Tag, *, parallel: bool) -> Tag:
    """Returns a tag for calls only, or an answer only."""
    tags = _tags(form, tools)
    if isinstance(form.call, JsonObject) and not form.trigger:
        # Texts of a format would hide those of an answer that is JSON as well.
        tags = [tag("", _whole(form.call, tool), form.end) for tool in tools]
    return {"type": "or", "elements": [_required(form, tags, parallel), answer]}


def optional(form: Format, tools: Sequence[Callee], *, parallel: bool, never_first: str = "") -> Tag:
    """Returns a tag for free text in which calls must be valid.

    Args:
        form: the format of the calls.
        tools: the tools.
        parallel: whether several calls may follow one another.
        never_first: a text with which free text does not begin: the marker of an optional part before it.
    """
    if form.bare:
        return _bare(form, tools, parallel=parallel, never_first=never_first)
    tags, is_section = _tags(form, tools), bool(form.opening and not form.wraps_each)
    if is_section:
        opening, closing = _around(form)
        tags = [tag(opening, _calls(form, tags, parallel), closing)]
    trigger = _NUMBER.split(form.trigger)[0]
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": tags,
        "excludes": [text for text in _markers(form) if text not in trigger],
        "at_least_one": False,
        "stop_after_first": is_section or not parallel,
    }


def _required(form: Format, tags: list[Tag], parallel: bool) -> Tag:
    opening, closing = ("", "") if form.wraps_each else _around(form)
    return _sequence([*_texts(opening), _calls(form, tags, parallel), *_texts(closing)])


def _bare(form: Format, tools: Sequence[Callee], *, parallel: bool, never_first: str) -> Tag:
    """Returns a tag for calls from the beginning on, or text, after which calls may follow a marker."""
    names = _any_of([tool.name for tool in tools])
    if isinstance(form.call, JsonObject):
        name = _any_of([form.call.name])
        start = rf'\{{\s*"(?:{name}"\s*:\s*"{names}|{_any_of(form.call.arguments)})"'
    else:
        start = rf"{names}\s*\("
    # A line break there may separate the answer from the thinking.
    never = [r"\n", rf"\s*(?:\[\s*)?{start}", rf"[\s\S]*{_any_of(_markers(form))}" if _markers(form) else ""]
    never.append(_any_of([never_first]) if never_first else "")
    text: Tag = {"type": "regex", "pattern": "".join(f"(?!{each})" for each in never if each) + r"[\s\S]*"}
    tags = _tags(form, tools)
    calls = _calls(form, tags, parallel)
    opening, closing = _around(form)
    ways = [_unmarked(form, tags, parallel), text]
    if form.opening:
        ways.append(_sequence([text, *_texts(opening), calls, *_texts(closing)]))
    return {"type": "or", "elements": ways}


def _unmarked(form: Format, tags: list[Tag], parallel: bool) -> Tag:
    """Returns a tag for calls that begin an answer, their list's bracket in a text with the first begin.

    Alone it might begin a text as well.
    """
    if not form.listed:
        return _calls(form, tags, parallel)
    first = _calls(form, [{**each, "begin": "[" + each["begin"]} for each in tags], parallel=False)
    following = _sequence([*_texts(form.separator), _calls(form, tags, parallel=False)])
    rest = [{"type": "star", "content": following}] if parallel else []
    return _sequence([first, *rest, constant("]")])


def _markers(form: Format) -> list[str]:
    """Returns the texts that begin calls in free text, as the parser reads it."""
    texts = (form.opening, *form.also, form.begin)
    return list(dict.fromkeys(filter(None, (_NUMBER.split(text)[0].strip() for text in texts))))


def _around(form: Format) -> tuple[str, str]:
    """Returns the texts around all calls, or around each."""
    return (form.opening + "[", "]" + form.closing) if form.listed else (form.opening, form.closing)


def _calls(form: Format, tags: list[Tag], parallel: bool) -> Tag:
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _tags(form: Format, tools: Sequence[Callee]) -> list[Tag]:
    """Returns a tag for a call of each tool."""
    opening, closing = _around(form) if form.wraps_each else ("", "")
    found = []
    for tool in tools:
        before, content, after = _call(form, tool)
        before, after = opening + form.begin + before, after + form.end + closing
        begin = _NUMBER.split(before)[0]
        end = "" if _NUMBER.search(after) else after
        parts = [*_texts(before[len(begin) :]), content, *_texts(after[len(end) :])]
        found.append(tag(begin, _sequence(parts), end))
    return found


def _whole(kind: JsonObject, tool: Callee) -> Tag:
    """Returns a tag for a call that is nothing but JSON."""
    arguments = {"$id": "urn:arguments", **tool.schema}
    members = {kind.name: {"const": tool.name}, kind.arguments[0]: arguments}
    return json_schema(
        {"type": "object", "properties": members, "required": list(members), "additionalProperties": False}
    )


def _call(form: Format, tool: Callee) -> tuple[str, Tag, str]:
    """Returns the text of a call up to its arguments, these, and the text after them."""
    match form.call:
        case JsonObject() as kind:
            before = f'{{{kind.first}"{kind.name}": "{tool.name}", "{kind.arguments[0]}": '
            return before, json_schema(tool.schema), "}"
        case NamedJson() as kind:
            number = kind.id_mark + "{0}" if kind.id_is_number else ""
            return kind.prefix + tool.name + number + kind.between, json_schema(tool.schema), ""
        case Tagged() as kind:
            style = {
                "type": "tagged",
                "key": kind.key,
                "key_end": kind.key_end,
                "json_key_ends": list(kind.json_key_ends),
                "value_end": kind.value_end,
            }
            return tool.name + kind.name_end, _styled(tool, style), ""
        case Python():
            return f"{tool.name}(", _styled(tool, {"type": "python"}), ")"
        case LooseObject(quote=quote):
            return tool.name, _styled(tool, {"type": "loose", "quote": quote}), ""
        case Elements(name_end=name_end, prefix=prefix):
            return tool.name + name_end, _styled(tool, {"type": "elements", "prefix": prefix}), ""
        case _:
            assert_never(form.call)


def _styled(tool: Callee, style: dict[str, Any]) -> Tag:
    return {**json_schema(tool.schema), "style": style}


def _texts(text: str) -> list[Tag]:
    """Returns tags for a text of a format, in which a number may stand; none for an empty text."""
    parts: list[Tag] = []
    for place, part in enumerate(_NUMBER.split(text)):
        if place:
            parts.append({"type": "regex", "pattern": "[0-9]{1,4}"})
        if part:
            parts.append(constant(part))
    return parts


def _sequence(parts: list[Tag]) -> Tag:
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": parts}


def _any_of(texts: Iterable[str]) -> str:
    return f"(?:{one_of(list(texts))['pattern']})"


def tag(begin: str, content: Tag, end: str) -> Tag:
    """Returns a tag for ``begin content end``."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def constant(text: str) -> Tag:
    """Returns a tag for ``text`` alone."""
    return {"type": "const_string", "value": text}


def one_of(texts: Sequence[str]) -> Tag:
    """Returns a tag for any of ``texts``: an expression, because the number of a tag's parts is limited."""
    return {"type": "regex", "pattern": "|".join(map(_literal, texts))}


def _literal(text: str) -> str:
    return "".join(char if char.isalnum() and char.isascii() else f"\\u{{{ord(char):x}}}" for char in text)


def json_schema(schema: Any) -> Tag:
    """Returns a tag for JSON that matches ``schema``, an object or a boolean, with plain objects closed."""
    return {"type": "json_schema", "json_schema": closed(_without_annotations(schema))}


def _without_annotations(schema: Any) -> Any:
    if isinstance(schema, Mapping):
        schema = {keyword: value for keyword, value in schema.items() if keyword not in _ANNOTATIONS}
    return map_schemas(schema, _without_annotations)


def structural(form: Tag) -> pb.StructuredOutput:
    """Returns ``form`` as a structural tag for the wire.

    Raises:
        RecursionError: if the tag is nested too deep to be written.
    """
    return pb.StructuredOutput(
        structural_tag=json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)
    )


def behind_thinking(at: Thinking, content: Tag, form: ThinkingFormat = THINK) -> Tag:
    """Returns ``content`` after the thinking that a grammar must allow before an answer."""
    content = _within_answer(at, content, form)
    if at in (Thinking.OVER, Thinking.ANSWER):
        return content
    blank: Tag = {"type": "regex", "pattern": r"\n{0,2}"}
    thought: Tag = {"type": "any_text"}
    if at is Thinking.OPEN:
        thinking = tag("", thought, form.end)
    else:
        thinking = {"type": "optional", "content": tag(form.start, thought, form.end)}
    return {"type": "sequence", "elements": [thinking, blank, content]}


def _within_answer(at: Thinking, content: Tag, form: ThinkingFormat) -> Tag:
    # Free text may have anything around it, and nothing may follow it.
    if not form.answer or content["type"] in ("any_text", "triggered_tags"):
        return content
    begin, end = ({"type": "optional", "content": one_of(texts)} for texts in zip(*form.answer, strict=True))
    elements = [content, end] if at is Thinking.ANSWER else [begin, content, end]
    return {"type": "sequence", "elements": elements}


def place_constraint(
    asked: pb.StructuredOutput, place: Callable[[Tag], Tag], param: str
) -> pb.StructuredOutput:
    """Returns a constraint for the whole output, in which ``asked`` covers only the answer.

    Raises:
        InvalidArgument: if the constraint is invalid JSON, incomplete, or nested too deep.
    """
    try:
        form = _tag_of(asked)
        whole = place(form)
        return asked if whole is form else structural(whole)
    except RecursionError as error:
        raise InvalidArgument(f"'{param}' is nested too deep; use at most 64 levels", param=param) from error
    except ValueError as error:
        raise InvalidArgument(f"'{param}' cannot be read: {error}", param=param) from error


def _tag_of(asked: pb.StructuredOutput) -> Tag:
    match asked.WhichOneof("spec"):
        case "json_schema":
            return json_schema(json.loads(asked.json_schema))
        case "json_object":
            return json_schema({"type": "object"})
        case "regex":
            return {"type": "regex", "pattern": asked.regex}
        case "grammar":
            return {"type": "grammar", "grammar": asked.grammar}
        case "choice":
            return one_of(asked.choice.values)
        case _:
            return _format_of(json.loads(asked.structural_tag))


def _format_of(tag_: Any) -> Tag:
    """Returns the format of a structural tag.

    Rewrites tags of the older form (``structures``, ``triggers``).
    """
    if not isinstance(tag_, dict):
        raise ValueError("a structural tag must be a JSON object")  # noqa: TRY004 - as the caller catches
    if "structures" not in tag_:
        if not isinstance(tag_.get("format"), dict):
            raise ValueError("a structural tag needs 'format', an object")
        form: Tag = tag_["format"]
        return form
    structures = tag_["structures"]
    if not isinstance(structures, list) or not all(
        isinstance(each, dict) and {"begin", "schema", "end"} <= each.keys() for each in structures
    ):
        raise ValueError("a structural tag's structures must each have begin, schema and end")
    return {
        "type": "triggered_tags",
        "triggers": tag_.get("triggers"),
        "tags": [tag(each["begin"], json_schema(each["schema"]), each["end"]) for each in structures],
    }
