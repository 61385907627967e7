"""Structural tags: what holds a model to its tools, in the format that its parser reads.

A structural tag is JSON (xgrammar 0.2 defines it); the worker compiles it. Every tool's schema is a document of its own in it, so that
references within a schema mean what they meant to the client.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from protos.triptych.v1 import common_pb2 as pb

Tag: TypeAlias = dict[str, Any]


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


def tag(begin: str, content: Tag, end: str) -> Tag:
    """``begin content end``."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def constant(text: str) -> Tag:
    """Just ``text``."""
    return {"type": "const_string", "value": text}


def json_schema(schema: Mapping[str, Any]) -> Tag:
    """JSON that fits ``schema``."""
    return {"type": "json_schema", "json_schema": dict(schema)}


def structural(form: Tag) -> pb.StructuredOutput:
    """A structural tag as the wire has it."""
    return pb.StructuredOutput(
        structural_tag=json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)
    )
