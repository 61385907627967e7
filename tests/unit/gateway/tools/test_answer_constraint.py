"""What an answer must match, together with thinking in front of it and tools that may be called instead."""

import json
from typing import Any

import pytest
import xgrammar

from gateway.answers.answer_plan import AnswerPlan, plan_answer
from gateway.answers.answer_reader import Message
from gateway.scheduler_link.served_model import Served
from gateway.tools.tags import json_schema
from protos.errors import InvalidArgument, TriptychError, Unsupported
from tests.support.gateway.tool_requests import accepts, byte_compiler, chat, settings
from tests.support.gateway.tool_templates import TIME, WEATHER
from worker_svc.grammars.spec import Spec, lower


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    return byte_compiler()


OPENED = "<|im_start|>assistant\n<think>\n"
STRICT = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WRONG_CALL = CALL.replace("Paris", 'Paris", "days": "x').replace('"city"', '"town"')
INTEGER = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "yes"}}
LEGACY = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f"],
}

# Each kind of constraint, what fits it and what does not.
KINDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "json_object": ({"response_format": {"type": "json_object"}}, '{"a": 1}', "[1]"),
    "json_schema": ({"response_format": INTEGER}, "12", "x"),
    "json": ({"structured_outputs": {"json": '{"type": "integer"}'}}, "12", "x"),
    "any json": ({"structured_outputs": {"json": True}}, "[1]", "x"),
    "regex": ({"structured_outputs": {"regex": "[ab]{3}"}}, "aba", "abc"),
    "grammar": ({"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}}, "yes", "maybe"),
    "choice": ({"structured_outputs": {"choice": ["yes", 'n"o\\\n\x7f']}}, 'n"o\\\n\x7f', "maybe"),
    "structural_tag": ({"response_format": TAG}, "yes", "no"),
    "structural_tag as text": ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, "yes", "no"),
    "older structural_tag": ({"response_format": LEGACY}, "so <f>12</f>.", "<f>x</f>"),
}


def opened(served: Served, **fields: Any) -> AnswerPlan:
    """For a prompt that has begun the thinking."""
    prompt = served.text.encode(OPENED, add_special_tokens=False)
    return plan_answer(settings(), served, chat(**fields), prompt)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_thinks_may_do_so_before_an_answer_that_is_held(
    qwen: Served, compiler: xgrammar.GrammarCompiler, kind: str
) -> None:
    """The answer behind the thinking must match, whatever was thought; an answer is not taken for thinking."""
    fields, good, bad = KINDS[kind]
    reading = plan_answer(settings(), qwen, chat(**fields), [1])
    assert reading.constraint is not None
    assert accepts(compiler, reading.constraint, f"<think>let me see: {bad}</think>\n\n{good}")
    assert accepts(compiler, reading.constraint, good)
    assert not accepts(compiler, reading.constraint, f"<think>let me see</think>{bad}")
    reading = opened(qwen, **fields)
    assert reading.constraint is not None
    assert not accepts(compiler, reading.constraint, good)
    assert accepts(compiler, reading.constraint, f"Hm.</think>{good}")
    assert Message.of(reading.reader().whole(f"Hm.</think>{good}")).content == [good]
    lower(Spec("structural_tag", reading.constraint.structural_tag))


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_is_held_may_be_calls_instead(
    qwen: Served, compiler: xgrammar.GrammarCompiler, kind: str
) -> None:
    """Tools that may be called are not switched off by a constraint, nor do they switch it off."""
    fields, good, bad = KINDS[kind]
    free = kind == "older structural_tag"  # takes any text beside its tags
    for tools, wrong in (([WEATHER, TIME], False), ([STRICT, TIME], True)):
        reading = opened(qwen, tools=tools, **fields)
        assert reading.constraint is not None
        assert reading.constraint_param in fields
        for text in (good, CALL, f"{CALL}\n{CALL}"):
            assert accepts(compiler, reading.constraint, f"Hm.</think>\n\n{text}")
            assert not accepts(compiler, reading.constraint, text)
        assert not accepts(compiler, reading.constraint, f"Hm.</think>{bad}")
        assert accepts(compiler, reading.constraint, f"Hm.</think>{WRONG_CALL}") == (not wrong or free)
        lower(Spec("structural_tag", reading.constraint.structural_tag))


def test_a_held_answer_of_a_model_that_does_not_think_is_held_as_it_is(smollm2: Served) -> None:
    """Nothing is to be put anywhere."""
    body = chat(response_format={"type": "json_object"})
    reading = plan_answer(settings(), smollm2, body, [1])
    assert (reading.constraint, reading.constraint_param) == (body.constraint(), "response_format")


@pytest.mark.parametrize("parser", ["pythonic", "mistral"])
def test_calls_or_a_held_answer_need_a_grammar(smollm2: Served, parser: str) -> None:
    """Where calls cannot be held, a constraint would silently switch them off."""
    body = chat(tools=[TIME], structured_outputs={"regex": "a"})
    chosen = settings(tool_call_parser=parser)
    if parser == "mistral":
        assert plan_answer(chosen, smollm2, body, [1]).constraint is not None
        return
    with pytest.raises(Unsupported, match="calls or this") as caught:
        plan_answer(chosen, smollm2, body, [1])
    assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}])
@pytest.mark.parametrize("kind", ["json_object", "choice"])
def test_a_required_call_and_a_held_answer_do_not_go_together(qwen: Served, choice: Any, kind: str) -> None:
    """One of them would have to be ignored."""
    fields, _, _ = KINDS[kind]
    (name,) = fields
    with pytest.raises(InvalidArgument, match="contradict one another") as caught:
        plan_answer(settings(), qwen, chat(tools=[TIME], tool_choice=choice, **fields), [1])
    assert caught.value.param == name


@pytest.mark.parametrize("tools", [[], [TIME]])
@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"json": "{not json"}, "cannot be read"),
        ({"json": '{"items":' * 980 + "{}" + "}" * 980}, "nested too deep"),
        ({"json": '{"items":' * 100_000}, "nested too deep"),
        ({"structural_tag": "[" * 100_000}, "nested too deep"),
        ({"structural_tag": "5"}, "must be a JSON object"),
        ({"structural_tag": "{}"}, "needs 'format'"),
        ({"structural_tag": '{"structures": [{"begin": "a"}]}'}, "begin, schema and end"),
    ],
)
def test_what_cannot_be_read_is_the_clients_fault(
    qwen: Served, tools: list[Any], asked: dict[str, Any], words: str
) -> None:
    """However broken or deep a text is."""
    with pytest.raises(InvalidArgument, match=words) as caught:
        opened(qwen, tools=tools, structured_outputs=asked)
    assert caught.value.param == "structured_outputs"


def test_a_grammar_of_many_choices_is_one_part(qwen: Served) -> None:
    """A tag may have 512 parts; as many choices as without thinking are taken."""
    reading = opened(qwen, structured_outputs={"choice": [str(n) for n in range(10_000)]})
    assert reading.constraint is not None
    lower(Spec("structural_tag", reading.constraint.structural_tag))


def test_numbers_in_a_schema_stay_what_they_are(qwen: Served) -> None:
    """No reader rounds them on the way."""
    reading = opened(qwen, structured_outputs={"json": '{"const": 123456789012345678901234567890}'})
    assert reading.constraint is not None
    assert "123456789012345678901234567890" in reading.constraint.structural_tag


# Schemas.


def test_annotations_do_not_count() -> None:
    """They go, but where they are names of properties, or data."""
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


@pytest.mark.parametrize(("levels", "fits"), [(54, True), (66, False)])
def test_how_deep_a_tools_schema_may_be_where_calls_are_held(qwen: Served, levels: int, fits: bool) -> None:
    """The tag around it has levels, too; docs/tools.md has the number."""
    schema: dict[str, Any] = {"enum": ["x"], "description": "d" * 1000}
    for _ in range((levels - 2) // 2):
        schema = {"type": "object", "properties": {"a": schema}, "description": "d" * 10_000}
    tool = {"type": "function", "function": {"name": "g", "parameters": schema, "strict": True}}
    bodies = (
        {"tools": [tool], "tool_choice": "required"},
        {"tools": [tool]},
        {"tools": [tool], "response_format": {"type": "json_object"}},
    )
    for body in bodies:
        found = None
        try:
            reading = plan_answer(settings(), qwen, chat(**body), [1])
            assert reading.constraint is not None
            lower(Spec("structural_tag", reading.constraint.structural_tag))
        except TriptychError as error:
            found = error
        assert (found is None) == fits
