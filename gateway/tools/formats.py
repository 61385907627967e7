"""The grammars of the formats in which models write tool calls.

A grammar is a structural tag: JSON in the form of xgrammar, which the worker compiles. The schema of a tool
is a separate document inside it, so references within a schema keep their meaning.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from gateway.parsers.reasoning import THINK, Marks, Thinking
from gateway.schemas.structured import closed, map_schemas
from protos.errors import InvalidArgument
from protos.triptych.v1 import common_pb2 as pb

Tag: TypeAlias = dict[str, Any]

# Keywords of JSON Schema that do not constrain values. They are removed, because long texts would use up the
# compiler's limits.
_ANNOTATIONS: Final = frozenset({"$comment", "default", "description", "examples", "title"})


class Callee(NamedTuple):
    """The part of a tool for a grammar."""

    name: str
    """Only letters, digits and "_.-", so JSON needs no escapes for it."""
    schema: Mapping[str, Any]
    """JSON schema of the arguments."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How a format writes calls: the constant texts around names and arguments."""

    before: str
    """Before a call's name."""
    between: str
    """Between the name and the arguments."""
    after: str
    """After the arguments."""
    separator: str = ""
    """Between two calls."""
    opening: str = ""
    """Before all calls."""
    closing: str = ""
    """After all calls."""
    trigger: str = ""
    """The text that begins calls in free text; empty: calls in free text cannot be recognized."""

    def required(self, tools: Sequence[Callee], *, parallel: bool) -> Tag:
        """Returns a tag for calls only: a single call, or with ``parallel`` any number."""
        calls: Tag = {
            "type": "tags_with_separator",
            "tags": self._tags(tools),
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": not parallel,
        }
        if not self.opening and not self.closing:
            return calls
        return {"type": "sequence", "elements": [constant(self.opening), calls, constant(self.closing)]}

    def optional(self, tools: Sequence[Callee], *, parallel: bool) -> Tag:
        """Returns a tag for free text in which calls must be valid."""
        if self.opening:
            calls = self.required(tools, parallel=parallel)["elements"][1]
            tags, once = [tag(self.opening, calls, self.closing)], True
        else:
            tags, once = self._tags(tools), not parallel
        return {
            "type": "triggered_tags",
            "triggers": [self.trigger],
            "tags": tags,
            "at_least_one": False,
            "stop_after_first": once,
        }

    def _tags(self, tools: Sequence[Callee]) -> list[Tag]:
        return [
            tag(self.before + tool.name + self.between, json_schema(tool.schema), self.after)
            for tool in tools
        ]


class ArgumentsAlone:
    """The shape of a call whose name is known: its arguments alone."""

    def required(self, tools: Sequence[Callee], *, parallel: bool) -> Tag:  # noqa: ARG002 - as Shape's
        """Returns a tag for the arguments of the first tool."""
        return json_schema(tools[0].schema)


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


def behind_thinking(at: Thinking, content: Tag, marks: Marks = THINK) -> Tag:
    """Returns ``content`` after the thinking that a grammar must allow before an answer."""
    if at is Thinking.OVER:
        return content
    blank: Tag = {"type": "regex", "pattern": r"\n{0,2}"}
    thought: Tag = {"type": "any_text"}
    if at is Thinking.OPEN:
        thinking = tag("", thought, marks.end)
    else:
        thinking = {"type": "optional", "content": tag(marks.start, thought, marks.end)}
    return {"type": "sequence", "elements": [thinking, blank, content]}


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


_NAME: Final = '{"name": "'
_ARGUMENTS: Final = '", "arguments": '
_PARAMETERS: Final = '", "parameters": '

SHAPES: Final[Mapping[str, Shape]] = {
    "hermes": Shape(
        before=f"<tool_call>\n{_NAME}",
        between=_ARGUMENTS,
        after="}\n</tool_call>",
        separator="\n",
        trigger="<tool_call>",
    ),
    "llama3_json": Shape(before=_NAME, between=_PARAMETERS, after="}", separator="; ", trigger=_NAME),
    "mistral": Shape(
        before=_NAME,
        between=_ARGUMENTS,
        after="}",
        separator=", ",
        opening="[TOOL_CALLS][",
        closing="]",
        trigger="[TOOL_CALLS]",
    ),
    "mistral_v11": Shape(before="[TOOL_CALLS]", between="", after="", trigger="[TOOL_CALLS]"),
    "mistral_v13": Shape(before="[TOOL_CALLS]", between="[ARGS]", after="", trigger="[TOOL_CALLS]"),
}

LIST_SHAPE: Final = Shape(
    before=_NAME, between=_PARAMETERS, after="}", separator=", ", opening="[", closing="]"
)
