"""Grammars of the tool call formats, and tools described in words."""

from typing import Any

import pytest

from gateway.generation.request_builder import show_tools_in_words
from gateway.parsers.events import CallStart
from gateway.parsers.formats import FORMATS, LIST
from gateway.parsers.machine import CallParser
from gateway.parsers.reasoning import Thinking
from gateway.text.chat_template import ChatTemplate
from gateway.tools.formats import LIST_SHAPE, SHAPES, Callee, behind_thinking, json_schema, structural
from tests.support.gateway.tool_requests import accepts
from tests.support.gateway.tool_templates import TEMPLATES, TIME


def test_tools_are_described_in_words() -> None:
    """The system's turn gets the description, else the user's."""
    template = ChatTemplate("{{ messages }}", {})
    turns = [{"role": "user", "content": "hi"}]
    (described,) = show_tools_in_words(template, turns, [TIME])
    assert described["content"].endswith('{"name": "get_time"}\n\nhi')
    described, user = show_tools_in_words(
        template, [{"role": "system", "content": "Be brief."}, *turns], [TIME]
    )
    assert (described["content"].partition("\n")[0], user) == ("Be brief.", turns[0])
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    _, answer = show_tools_in_words(
        template, [*turns, {"role": "assistant", "content": "", "tool_calls": [call]}], []
    )
    assert answer["content"] == '[{"name": "f", "parameters": {"a": 1}}]'
    (described,) = show_tools_in_words(template, turns, [TIME], FORMATS["mistral_v13"])
    assert '\n[TOOL_CALLS]NAME[ARGS]{"PARAMETER": "VALUE"}\n' in described["content"]
    knowing = ChatTemplate(TEMPLATES["hermes"], {})
    assert show_tools_in_words(knowing, turns, [TIME]) == turns


# Grammars, compiled as the worker does.


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "$defs": {"city": {"type": "string"}},
}
# Its definition has the same name as the other tool's, but another meaning.
OTHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "$defs": {"city": {"type": "integer"}},
}
TOOLS = [Callee("get_weather", SCHEMA), Callee("get_time", OTHER)]

WRITTEN = {
    "hermes": ('<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>', "\n"),
    "llama3_json": ('{"name": "%s", "parameters": %s}', "; "),
    "mistral": ('{"name": "%s", "arguments": %s}', ", "),
    "mistral_v11": ("[TOOL_CALLS]%s%s", ""),
    "mistral_v13": ("[TOOL_CALLS]%s[ARGS]%s", ""),
    "list": ('{"name": "%s", "parameters": %s}', ", "),
}


def written(name: str, *calls: tuple[str, str]) -> str:
    form, separator = WRITTEN[name]
    text = separator.join(form % call for call in calls)
    return {"mistral": f"[TOOL_CALLS][{text}]", "list": f"[{text}]"}.get(name, text)


PARIS = ("get_weather", '{"city": "Paris"}')
NOON = ("get_time", '{"city": 12}')


@pytest.mark.parametrize("name", WRITTEN)
def test_required_calls(name: str) -> None:
    """The grammar accepts exactly valid calls of any tool, and the format's parser reads them."""
    form, shape = (LIST, LIST_SHAPE) if name == "list" else (FORMATS[name], SHAPES[name])
    many = structural(shape.required(TOOLS, parallel=True))
    one = structural(shape.required(TOOLS, parallel=False))
    assert accepts(many, written(name, PARIS))
    assert accepts(many, written(name, PARIS, NOON, PARIS))
    assert accepts(one, written(name, NOON))
    assert not accepts(one, written(name, PARIS, NOON))
    for wrong in (
        ("get_weather", '{"city": 12}'),
        ("get_time", '{"city": "Paris"}'),
        ("get_weather", "{}"),
        ("other", "{}"),
    ):
        assert not accepts(many, written(name, wrong))
    assert not accepts(many, "")
    assert not accepts(many, "Well. " + written(name, PARIS))
    starts = [
        event
        for event in CallParser(form, dict.fromkeys(("get_weather", "get_time"))).whole(
            written(name, PARIS, NOON)
        )
        if isinstance(event, CallStart)
    ]
    assert [start.name for start in starts] == ["get_weather", "get_time"]


@pytest.mark.parametrize("name", [name for name in WRITTEN if name != "list"])
def test_optional_calls(name: str) -> None:
    """The grammar accepts any text, and valid calls in it."""
    shape = SHAPES[name]
    constraint = structural(shape.optional(TOOLS, parallel=True))
    assert accepts(constraint, "It is noon.")
    assert accepts(constraint, written(name, PARIS))
    assert accepts(constraint, "Let me look. " + written(name, PARIS))
    assert not accepts(constraint, written(name, ("get_weather", '{"city": 12}')))
    assert not accepts(constraint, written(name, ("other", "{}")))


def test_annotations_are_removed_from_schemas() -> None:
    schema = {
        "title": "T", "description": "x" * 300_000, "$comment": "c", "default": {}, "examples": [],
        "type": "object",
        "properties": {
            "title": {"type": "string", "description": "d"},
            "description": {"enum": [{"title": "kept", "default": 1}]},
            "default": {"const": {"description": "kept"}},
            "list": {"items": {"title": "T", "anyOf": [{"default": 1}, True]}, "prefixItems": [{"title": "T"}]},
        },
        "patternProperties": {"title": {"title": "T"}},
        "$defs": {"default": {"description": "d", "type": "integer"}},
        "required": ["title", "description"],
        "additionalProperties": {"title": "T"},
        "not": {"title": "T"},
    }  # fmt: skip
    assert json_schema(schema)["json_schema"] == {
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "description": {"enum": [{"title": "kept", "default": 1}]},
            "default": {"const": {"description": "kept"}},
            "list": {"items": {"anyOf": [{}, True]}, "prefixItems": [{}]},
        },
        "patternProperties": {"title": {}},
        "$defs": {"default": {"type": "integer"}},
        "required": ["title", "description"],
        "additionalProperties": {},
        "not": {},
    }
    assert json_schema(True)["json_schema"] is True


@pytest.mark.parametrize(
    ("at", "passing", "failing"),
    [
        (Thinking.OPEN, ["Hm.</think>{}", "\nHm.\n</think>\n\n{}", "<think>Hm.</think>{}"], ["{}", "Hm."]),
        (Thinking.POSSIBLE, ["{}", "<think>Hm.</think>\n\n{}"], ["Hm.</think>{}"]),
        (Thinking.OVER, ["{}"], ["<think>Hm.</think>{}"]),
    ],
)
def test_a_constraint_begins_behind_the_thinking(
    at: Thinking, passing: list[str], failing: list[str]
) -> None:
    """The grammar constrains only the text behind the thinking."""
    constraint = structural(behind_thinking(at, json_schema({"type": "object", "properties": {}})))
    for text in passing:
        assert accepts(constraint, text)
    for text in failing:
        assert not accepts(constraint, text)
