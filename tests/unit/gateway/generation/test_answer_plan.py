"""Plans for answers: constraints together with thinking and optional tool calls."""

import json
from typing import Any

import pytest

from gateway.generation.answer_plan import AnswerPlan, plan_answer
from gateway.openai.chat import CollectedMessage
from gateway.parsers.formats import FORMATS
from gateway.parsers.writing import Call, write
from gateway.scheduler_client.served_model import ServedModel
from protos.errors import InvalidArgument, TriptychError, Unsupported
from tests.support.gateway.tool_requests import accepts, chat, function, settings
from tests.support.gateway.tool_templates import TIME, WEATHER
from tests.support.worker.grammar_texts import lowered
from worker_svc.grammars.spec import Spec

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

# Each kind of constraint, with a text that matches and one that does not.
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


def opened(served: ServedModel, **fields: Any) -> AnswerPlan:
    """Returns the plan for a prompt that has begun the thinking."""
    prompt = served.text.encode(OPENED, add_special_tokens=False)
    return plan_answer(settings(), served, chat(**fields), prompt)


@pytest.mark.parametrize("kind", KINDS)
def test_a_constraint_allows_thinking_before_the_answer(qwen: ServedModel, kind: str) -> None:
    """The answer behind the thinking must match, whatever the thinking says."""
    fields, good, bad = KINDS[kind]
    plan = plan_answer(settings(), qwen, chat(**fields), [1])
    assert plan.constraint is not None
    assert accepts(plan.constraint, f"<think>let me see: {bad}</think>\n\n{good}")
    assert accepts(plan.constraint, good)
    assert not accepts(plan.constraint, f"<think>let me see</think>{bad}")
    plan = opened(qwen, **fields)
    assert plan.constraint is not None
    assert not accepts(plan.constraint, good)
    assert accepts(plan.constraint, f"Hm.</think>{good}")
    assert CollectedMessage.from_events(plan.reader().whole(f"Hm.</think>{good}")).content == [good]
    lowered(Spec("structural_tag", plan.constraint.structural_tag))


@pytest.mark.parametrize("kind", KINDS)
def test_a_constraint_allows_optional_calls_instead_of_the_answer(qwen: ServedModel, kind: str) -> None:
    """A constraint does not switch off optional tools, and tools do not switch off the constraint."""
    fields, good, bad = KINDS[kind]
    free = kind == "older structural_tag"  # takes any text beside its tags
    for tools, wrong in (([WEATHER, TIME], False), ([STRICT, TIME], True)):
        plan = opened(qwen, tools=tools, **fields)
        assert plan.constraint is not None
        assert plan.constraint_param in fields
        for text in (good, CALL, f"{CALL}\n{CALL}"):
            assert accepts(plan.constraint, f"Hm.</think>\n\n{text}")
            assert not accepts(plan.constraint, text)
        assert not accepts(plan.constraint, f"Hm.</think>{bad}")
        assert accepts(plan.constraint, f"Hm.</think>{WRONG_CALL}") == (not wrong or free)


def test_a_choice_of_calls_allows_no_others(qwen: ServedModel) -> None:
    """Texts with calls in them say themselves which calls may come."""
    plan = opened(qwen, tools=[WEATHER], structured_outputs={"choice": [CALL]})
    assert plan.constraint is not None
    assert accepts(plan.constraint, f"Hm.</think>\n\n{CALL}")
    assert not accepts(plan.constraint, f"Hm.</think>\n\n{CALL.replace('Paris', 'Rome')}")


@pytest.mark.parametrize("parser", FORMATS)
def test_every_format_has_grammars(smollm2: ServedModel, parser: str) -> None:
    """Required, strict and optional calls, and calls or an answer, are held to the format's grammar."""
    form, chosen = FORMATS[parser], settings(tool_call_parser=parser)
    time, weather = Call("get_time", {}), Call("get_weather", {"city": "Paris"})
    named = {"type": "function", "function": {"name": "get_time"}}
    bodies: list[tuple[dict[str, Any], list[Call], list[Call]]] = [
        ({"tool_choice": "required"}, [weather, time], [Call("get_time", {"a": 1})]),
        ({"tool_choice": named}, [time], [weather]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [time], [time, time]),
        ({"structured_outputs": {"regex": "a"}}, [weather, time], [Call("get_time", {"a": 1})]),
        ({}, [weather, time], [Call("get_weather", {"town": "Paris"})]),
    ]
    for fields, right, wrong in bodies:
        plan = plan_answer(chosen, smollm2, chat(tools=[STRICT, TIME], **fields), [1])
        assert plan.constraint is not None
        assert accepts(plan.constraint, write(form, right))
        assert not accepts(plan.constraint, write(form, wrong))
        read = CollectedMessage.from_events(plan.reader().whole(write(form, right)))
        assert [call["function"]["name"] for call in read.calls.values()] == [call.name for call in right]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}])
def test_a_response_format_leaves_required_calls_alone(qwen: ServedModel, choice: Any) -> None:
    """The format is for content, which an answer of calls has none of; agents send both in every turn."""
    fields, good, _ = KINDS["json_object"]
    plan = plan_answer(settings(), qwen, chat(tools=[TIME], tool_choice=choice, **fields), [1])
    assert plan.constraint is not None
    assert plan.constraint_param == "tools"
    assert not accepts(plan.constraint, good)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}])
@pytest.mark.parametrize("kind", ["choice", "regex"])
def test_a_constraint_with_a_required_call_is_refused(qwen: ServedModel, choice: Any, kind: str) -> None:
    """structured_outputs constrains the whole output, so one of the two would have to be ignored."""
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
def test_an_unreadable_constraint_is_an_invalid_argument(
    qwen: ServedModel, tools: list[Any], asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        opened(qwen, tools=tools, structured_outputs=asked)
    assert caught.value.param == "structured_outputs"


def test_many_choices_fit_into_one_tag(qwen: ServedModel) -> None:
    """A tag may have 512 parts, yet as many choices are accepted as without thinking."""
    plan = opened(qwen, structured_outputs={"choice": [str(n) for n in range(10_000)]})
    assert plan.constraint is not None
    lowered(Spec("structural_tag", plan.constraint.structural_tag))


def test_large_numbers_in_a_schema_keep_their_digits(qwen: ServedModel) -> None:
    plan = opened(qwen, structured_outputs={"json": '{"const": 123456789012345678901234567890}'})
    assert plan.constraint is not None
    assert "123456789012345678901234567890" in plan.constraint.structural_tag


@pytest.mark.parametrize(("levels", "fits"), [(48, True), (66, False)])
@pytest.mark.parametrize("parser", ["hermes", "kimi_k2", "llama3_json", "pythonic", "qwen3_coder"])
def test_the_depth_limit_of_a_constrained_tools_schema(
    qwen: ServedModel, parser: str, levels: int, fits: bool
) -> None:
    """The tag around the schema uses up levels, too; docs/tools.md states the number."""
    schema: dict[str, Any] = {"enum": ["x"], "description": "d" * 1000}
    for _ in range((levels - 2) // 2):
        schema = {"type": "object", "properties": {"a": schema}, "description": "d" * 10_000}
    tool = {"type": "function", "function": {"name": "g", "parameters": schema, "strict": True}}
    bodies = (
        {"tools": [tool], "tool_choice": "required"},
        {"tools": [tool]},
        {"tools": [tool], "response_format": INTEGER},
    )
    for body in bodies:
        found = None
        try:
            plan = plan_answer(settings(tool_call_parser=parser), qwen, chat(**body), [1])
            assert plan.constraint is not None
            lowered(Spec("structural_tag", plan.constraint.structural_tag))
        except TriptychError as error:
            found = error
        assert (found is None) == fits


def test_thinking_is_parsed_without_tools(qwen: ServedModel) -> None:
    """A model that thinks gets a parser, unless a setting switches it off."""
    plan = plan_answer(settings(), qwen, chat(), [1])
    assert not plan.plain
    assert plan.markers == frozenset({"<think>", "</think>"})
    assert plan_answer(settings(reasoning_parser="none"), qwen, chat(), [1]).plain


def test_models_without_a_format(smollm2: ServedModel) -> None:
    """A required call is written as JSON; optional calls are refused."""
    chosen = settings(tool_call_parser="none")
    plan = plan_answer(chosen, smollm2, chat(tools=[TIME], tool_choice="required"), [1])
    assert plan.constraint is not None
    assert accepts(plan.constraint, '[{"name": "get_time", "parameters": {}}]')
    with pytest.raises(Unsupported) as caught:
        plan_answer(chosen, smollm2, chat(tools=[WEATHER, function(strict=True)]), [1])
    assert caught.value.param == "tool_choice"


def test_strict_enforces_a_tools_schema(qwen: ServedModel) -> None:
    """A required call matches its schema unless strict is false; a tool without parameters takes none."""
    for tool, arguments, fits in (
        (WEATHER, '{"town": 1}', False),
        ({**WEATHER, "function": {**WEATHER["function"], "strict": False}}, '{"town": 1}', True),
        (TIME, '{"town": 1}', False),
        (TIME, "{}", True),
    ):
        plan = plan_answer(settings(), qwen, chat(tools=[tool], tool_choice="required"), [1])
        assert plan.constraint is not None
        call = f'{{"name": "{tool["function"]["name"]}", "arguments": {arguments}}}'
        text = f"<tool_call>\n{call}\n</tool_call>"
        assert accepts(plan.constraint, text) == fits
