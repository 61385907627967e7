"""Structural tags: what holds a model to its tools, in the format that its parser reads.

A structural tag is JSON (xgrammar 0.2 defines it); the worker compiles it. Every tool's schema is a document of its own in it, so that
references within a schema mean what they meant to the client.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from gateway.parsers.reasoning import THINK, Marks, Thinking
from protos.triptych.v1 import common_pb2 as pb

Tag: TypeAlias = dict[str, Any]

# Keywords of JSON Schema that say nothing about what fits: they are not sent, as long texts would fill what a compiler takes.
_ANNOTATIONS: Final = frozenset({"$comment", "default", "description", "examples", "title"})
# Keywords whose value is a schema or a list of schemas, and those whose value has one schema a name. What stands in the others
# (``enum``, ``const`` and their like) is data, whatever it looks like.
_SCHEMAS: Final = frozenset({
    "additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "else", "if", "items", "not", "oneOf", "prefixItems",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
_BY_NAME: Final = frozenset({
    "$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties",
})  # fmt: skip


class Callee(NamedTuple):
    """A tool, as far as a grammar needs it."""

    # Letters, digits and "_.-" only, so that it is itself in JSON.
    name: str
    # JSON Schema of the arguments.
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """How a format writes calls."""

    before: str
    """In front of a call's name."""
    between: str
    """Between the name and the arguments."""
    after: str
    """Behind the arguments."""
    separator: str = ""
    """Between two calls."""
    opening: str = ""
    """In front of all calls."""
    closing: str = ""
    """Behind all calls."""
    trigger: str = ""
    """What begins calls in free text; empty: such text cannot be told from calls."""

    def required(self, tools: Sequence[Callee], *, parallel: bool) -> Tag:
        """Calls and nothing else: one, or at least one."""
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
        """Free text, in which calls must be right."""
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
    """The shape of one call whose name is known: nothing but its arguments."""

    def required(self, tools: Sequence[Callee], *, parallel: bool) -> Tag:  # noqa: ARG002 - as Shape's
        """The arguments of the first tool."""
        return json_schema(tools[0].schema)


def tag(begin: str, content: Tag, end: str) -> Tag:
    """``begin content end``."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def constant(text: str) -> Tag:
    """Just ``text``."""
    return {"type": "const_string", "value": text}


def one_of(texts: Sequence[str]) -> Tag:
    """Any of ``texts``: as a grammar, because a tag may have fewer parts than there may be texts."""
    return {"type": "grammar", "grammar": "root ::= " + " | ".join(map(_literal, texts))}


def _literal(text: str) -> str:
    # JSON's escapes are a grammar's, too.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def json_schema(schema: Any) -> Tag:
    """JSON that fits ``schema``, an object or a boolean."""
    return {"type": "json_schema", "json_schema": _without_annotations(schema)}


def _without_annotations(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_annotations(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _SCHEMAS:
            kept[keyword] = _without_annotations(value)
        elif keyword in _BY_NAME and isinstance(value, Mapping):
            kept[keyword] = {name: _without_annotations(item) for name, item in value.items()}
        elif keyword not in _ANNOTATIONS:
            kept[keyword] = value
    return kept


def structural(form: Tag) -> pb.StructuredOutput:
    """A structural tag as the wire has it.

    Raises:
        RecursionError: if it is nested too deep to be written.
    """
    return pb.StructuredOutput(
        structural_tag=json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)
    )


def behind_thinking(at: Thinking, content: Tag, marks: Marks = THINK) -> Tag:
    """Returns ``content`` behind the thinking that a grammar must allow in front of an answer.

    Args:
        at: where the answer begins.
        content: what the answer must match.
        marks: the markers around the thinking.
    """
    if at is Thinking.OVER:
        return content
    blank: Tag = {"type": "regex", "pattern": r"\n{0,2}"}
    thought: Tag = {"type": "any_text"}
    if at is Thinking.OPEN:
        thinking = tag("", thought, marks.end)
    else:
        thinking = {"type": "optional", "content": tag(marks.start, thought, marks.end)}
    return {"type": "sequence", "elements": [thinking, blank, content]}
