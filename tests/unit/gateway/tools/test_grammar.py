"""Grammars of the tool call formats, and tools described in words."""

from typing import Any

import pytest

from gateway.generation.request_builder import show_tools_in_words
from gateway.parsers.formats import FORMATS, LIST, Elements, Format, Tagged
from gateway.parsers.reasoning import Thinking
from gateway.parsers.writing import Call, write
from gateway.text.chat_template import ChatTemplate
from gateway.tools import harmony
from gateway.tools.grammar import Callee, behind_thinking, either, json_schema, optional, required, structural
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

PARIS = Call("get_weather", {"city": "Paris"})
NOON = Call("get_time", {"city": 12})
WRONG = [
    Call("get_weather", {"city": 12}),
    Call("get_time", {"city": "Paris"}),
    Call("get_weather", {}),
    Call("other", {}),
]
NAMES = [*FORMATS, "list"]


def entry(name: str) -> Format:
    return LIST if name == "list" else FORMATS[name]


def wrong(form: Format) -> list[Call]:
    """Calls that do not match the tools. Where strings are plain, any value is one."""
    plain = isinstance(form.call, Tagged) and not form.call.json_key_ends
    return WRONG[1:] if plain or isinstance(form.call, Elements) else WRONG


@pytest.mark.parametrize("name", NAMES)
def test_required_calls(name: str) -> None:
    """The grammar accepts exactly valid calls of any tool, and the format's parser reads them."""
    form = entry(name)
    many = structural(required(form, TOOLS, parallel=True))
    one = structural(required(form, TOOLS, parallel=False))
    assert accepts(many, write(form, [PARIS]))
    assert accepts(many, write(form, [PARIS, NOON, PARIS]))
    assert accepts(one, write(form, [NOON]))
    assert not accepts(one, write(form, [PARIS, NOON]))
    for call in wrong(form):
        assert not accepts(many, write(form, [call]))
    assert not accepts(many, "")
    assert not accepts(many, "Well. " + write(form, [PARIS]))


@pytest.mark.parametrize("name", FORMATS)
def test_optional_calls(name: str) -> None:
    """The grammar accepts any text, and valid calls in it, or at its beginning if they have no marker."""
    form = entry(name)
    many = structural(optional(form, TOOLS, parallel=True))
    one = structural(optional(form, TOOLS, parallel=False))
    assert accepts(many, "It is [noon], {and} get_time is f(x).")
    assert accepts(many, write(form, [PARIS]))
    assert accepts(many, write(form, [PARIS, NOON]))
    assert accepts(one, write(form, [NOON]))
    assert not accepts(one, write(form, [PARIS, NOON]))
    if form.trigger:
        assert accepts(many, "Let me look. " + write(form, [PARIS]))
    for call in wrong(form):
        # Without a marker, only a name of the tools makes a call.
        is_text = call.name == "other" and not form.trigger
        assert accepts(many, write(form, [call])) is is_text


@pytest.mark.parametrize("at", Thinking)
@pytest.mark.parametrize("name", FORMATS)
def test_calls_behind_thinking(name: str, at: Thinking) -> None:
    """Thinking may precede required and optional calls and texts, and is no part of them."""
    form = entry(name)
    before = {
        Thinking.OPEN: "Hm.</think>\n\n",
        Thinking.POSSIBLE: "<think>Hm.</think>\n\n",
        Thinking.OVER: "",
        Thinking.ANSWER: "",
    }[at]
    never_first = "<think>" if at is Thinking.POSSIBLE else ""
    forms = [
        required(form, TOOLS, parallel=True),
        optional(form, TOOLS, parallel=True, never_first=never_first),
        either(form, TOOLS, json_schema({"items": {"type": "integer"}, "type": "array"}), parallel=True),
    ]
    for place, tag in enumerate(forms):
        constraint = structural(behind_thinking(at, tag))
        assert accepts(constraint, before + write(form, [PARIS, NOON]))
        assert not accepts(constraint, before + write(form, [wrong(form)[0]]))
        assert accepts(constraint, before + "It is noon.") is (place == 1)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_or_an_answer(name: str) -> None:
    """The output is calls, or the answer asked for, and nothing else."""
    form = entry(name)
    schema = {"type": "object", "properties": {"nick": {"type": "string"}, "fs": {"type": "boolean"}}}
    answers = {
        '{"nick": "Bo", "fs": false}': json_schema(schema),
        "get_wea": {"type": "regex", "pattern": "get_wea|yes"},
        "[f": {"type": "grammar", "grammar": 'root ::= "[f" | "yes"'},
    }
    for text, answer in answers.items():
        constraint = structural(either(form, TOOLS, answer, parallel=True))
        assert accepts(constraint, text)
        assert accepts(constraint, write(form, [PARIS, NOON]))
        for other in ("It is noon.", text + write(form, [PARIS]), write(form, [wrong(form)[0]])):
            assert not accepts(constraint, other)


@pytest.mark.parametrize("name", FORMATS)
def test_any_arguments(name: str) -> None:
    """A tool that is not strict takes any arguments, and a tool without parameters takes none."""
    form = entry(name)
    tools = [Callee("f", {"type": "object"}), Callee("g", {"type": "object", "additionalProperties": False})]
    constraint = structural(required(form, tools, parallel=True))
    arguments = {"city": "Paris", "days": 3, "places": ["a"], "where": {"x": None}}
    assert accepts(constraint, write(form, [Call("f", arguments), Call("f", {}), Call("g", {})]))
    assert not accepts(constraint, write(form, [Call("g", {"a": 1})]))


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


@pytest.mark.parametrize(
    "name", ["cohere", "kimi_k2", "kimi_k3", "llama4_pythonic", "minimax_m3", "mistral_v13"]
)
def test_calls_of_as_many_tools_as_a_request_takes(name: str) -> None:
    form, tools = FORMATS[name], [Callee(f"tool_{number}", SCHEMA) for number in range(128)]
    for tag in (required(form, tools, parallel=True), optional(form, tools, parallel=True)):
        constraint = structural(tag)
        call = Call("tool_127", {"city": "Paris"})
        assert accepts(constraint, write(form, [call]))
        assert not accepts(constraint, write(form, [call._replace(arguments={})]))


def test_calls_of_gpt_oss_take_as_many_tools_as_a_request() -> None:
    tools = [Callee(f"tool_{number}", SCHEMA) for number in range(128)]
    constraint = structural(harmony.after_thinking("assistant", harmony.calls(tools)))
    call = '<|channel|>commentary to=functions.tool_127 <|constrain|>json<|message|>{"city": "Paris"}'
    assert accepts(constraint, call)
    assert not accepts(constraint, call.replace("127", "128"))
