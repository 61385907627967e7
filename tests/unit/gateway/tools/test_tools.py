"""Tools of a request: what is taken, what grammar comes of it, and which format a chat template shows."""

import json
from pathlib import Path
from typing import Any

import pytest
import xgrammar

from gateway.answers.answer_plan import plan_answer
from gateway.format_names import TOOL_FORMATS
from gateway.parsers.events import CallStart
from gateway.parsers.reasoning import Thinking
from gateway.scheduler_link.served_model import Served
from gateway.schemas.base import parse
from gateway.schemas.chat import ChatCompletionRequest
from gateway.text.chat_template import ChatTemplate
from gateway.text.template_probe import tool_format
from gateway.text.tokenization import TextCodec
from gateway.tools.formats import FORMATS, LIST
from gateway.tools.prompting import show_tools_in_words
from gateway.tools.tags import Callee, Shape, behind_thinking, json_schema, structural
from protos.errors import InvalidArgument, Unsupported
from tests.support.gateway.tool_requests import USER, accepts, byte_compiler, chat, function, settings
from tests.support.gateway.tool_templates import TEMPLATES, TIME, WEATHER, folder_with


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": {}}, "tools", "list"),
        ({"tools": [5]}, "tools[0]", "object"),
        ({"tools": [{}]}, "tools[0].function", "is required"),
        ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools[0].type", "only tools of type 'function'"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "is required"),
        ({"tools": [function(name="a b")]}, "tools[0].function.name", "64 letters"),
        ({"tools": [function(name='a"b')]}, "tools[0].function.name", "64 letters"),
        ({"tools": [function(name="")]}, "tools[0].function.name", "64 letters"),
        ({"tools": [function(name="x" * 65)]}, "tools[0].function.name", "64 letters"),
        ({"tools": [function(parameters=[])]}, "tools[0].function.parameters", "object"),
        ({"tools": [function(parameters={"type": "string"})]}, "tools[0].function.parameters", "schema of an object"),
        ({"tools": [function(strict="yes")]}, "tools[0].function.strict", "boolean"),
        ({"tools": [function(returns={})]}, "tools[0].function.returns", "unknown parameter"),
        ({"tools": [TIME, TIME]}, "tools", "two functions named 'get_time'"),
        ({"tool_choice": "required"}, "tool_choice", "needs 'tools'"),
        ({"tool_choice": "any", "tools": [TIME]}, "tool_choice", '"required"'),
        ({"tool_choice": 5, "tools": [TIME]}, "tool_choice", '"required"'),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [TIME]}, "tool_choice", '"required"'),
        ({"tool_choice": {"type": "function"}, "tools": [TIME]}, "tool_choice", '"required"'),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": [TIME]}, "tool_choice", "'f', which is not among"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
    ],
)  # fmt: skip
def test_bad_tools_name_their_place(fields: dict[str, Any], param: str, words: str) -> None:
    """One line that says where and what to change."""
    with pytest.raises(InvalidArgument, match=words) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert "\n" not in caught.value.message


def test_neutral_values() -> None:
    """What clients send out of habit changes nothing."""
    habits: list[dict[str, Any]] = [
        {"tools": None}, {"tools": []}, {"tool_choice": "auto"}, {"tool_choice": None, "parallel_tool_calls": None},
    ]  # fmt: skip
    for fields in habits:
        assert chat(**fields).tools == []
    index = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"index": 0, "id": "a", "function": {"name": "f"}}],
    }
    (_, turn) = parse(ChatCompletionRequest, json.dumps({"messages": [*USER, index]}).encode()).messages
    assert turn.for_template()["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}
    ]


@pytest.mark.parametrize(
    ("written", "seen"),
    [('{"a": 1}', {"a": 1}), ("", {}), (None, {}), ('{"a": ', {}), ("[1]", {}), ("5", {}), ('{"a": {"b": []}}', {"a": {"b": []}})],
)  # fmt: skip
def test_earlier_arguments_are_objects(written: str | None, seen: dict[str, Any]) -> None:
    """Templates need one; a model's broken arguments must not end the conversation, and become an empty one, as in vLLM."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": written}}
    body = chat(messages=[*USER, {"role": "assistant", "tool_calls": [call]}])
    assert body.messages[1].for_template()["tool_calls"][0]["function"]["arguments"] == seen


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_format_is_seen_in_the_template(name: str) -> None:
    """By how it writes a call, not by what it is called."""
    assert tool_format(ChatTemplate(TEMPLATES[name], {})) == name


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages }}",
        "{{ tools }}{{ messages }}",
        "{{ tools }}{{ raise_exception('no') }}",
        # Markers of other formats around JSON of the same kind.
        TEMPLATES["llama3_json"].replace('{"name"', '<|tool_call|>{"name"'),
        TEMPLATES["pythonic"].replace("[{{", "<|tool_call_start|>[{{"),
        TEMPLATES["hermes"].replace('{"name"', '<function={"name"'),
    ],
)
def test_other_templates_show_no_format(source: str) -> None:
    """A guess would lose calls; a setting names the parser then."""
    assert tool_format(ChatTemplate(source, {})) is None


def test_a_template_for_tools_is_used_where_there_are_tools(tmp_path: Path) -> None:
    """Hermes' models have one by the name tool_use beside the default."""
    (folder := folder_with(tmp_path, "", [])).joinpath("chat_template.jinja").unlink()
    templates = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": TEMPLATES["hermes"]}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    codec = TextCodec.load(folder)
    assert codec.chat_template is not None
    assert codec.chat_template.source == "D"
    assert codec.tool_template is not None
    assert codec.tool_template.source == TEMPLATES["hermes"]
    assert codec.tool_format == "hermes"


def test_models_that_know_no_tools_are_told_in_words() -> None:
    """In the system's turn if there is one, else in the user's; earlier calls in the form that they are made in."""
    template = ChatTemplate("{{ messages }}", {})
    turns = [{"role": "user", "content": "hi"}]
    (told,) = show_tools_in_words(template, turns, [TIME])
    assert told["content"].endswith('{"name": "get_time"}\n\nhi')
    told, user = show_tools_in_words(template, [{"role": "system", "content": "Be brief."}, *turns], [TIME])
    assert (told["content"].partition("\n")[0], user) == ("Be brief.", turns[0])
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    _, answer = show_tools_in_words(
        template, [*turns, {"role": "assistant", "content": "", "tool_calls": [call]}], []
    )
    assert answer["content"] == '[{"name": "f", "parameters": {"a": 1}}]'
    knowing = ChatTemplate(TEMPLATES["hermes"], {})
    assert show_tools_in_words(knowing, turns, [TIME]) == turns


# Grammars, as the worker compiles them.


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    return byte_compiler()


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "$defs": {"city": {"type": "string"}},
}
# The same name of a definition means something else in another tool.
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
def test_required_calls(compiler: xgrammar.GrammarCompiler, name: str) -> None:
    """Right calls of any tool pass, wrong ones do not; and the format's own parser reads what passes."""
    form = LIST if name == "list" else FORMATS[name]
    assert form.shape is not None
    many = structural(form.shape.required(TOOLS, parallel=True))
    one = structural(form.shape.required(TOOLS, parallel=False))
    assert accepts(compiler, many, written(name, PARIS))
    assert accepts(compiler, many, written(name, PARIS, NOON, PARIS))
    assert accepts(compiler, one, written(name, NOON))
    assert not accepts(compiler, one, written(name, PARIS, NOON))
    for wrong in (
        ("get_weather", '{"city": 12}'),
        ("get_time", '{"city": "Paris"}'),
        ("get_weather", "{}"),
        ("other", "{}"),
    ):
        assert not accepts(compiler, many, written(name, wrong))
    assert not accepts(compiler, many, "")
    assert not accepts(compiler, many, "Well. " + written(name, PARIS))
    starts = [
        event
        for event in form.make({"get_weather", "get_time"}).whole(written(name, PARIS, NOON))
        if isinstance(event, CallStart)
    ]
    assert [start.name for start in starts] == ["get_weather", "get_time"]


@pytest.mark.parametrize("name", [name for name in WRITTEN if name != "list"])
def test_optional_calls(compiler: xgrammar.GrammarCompiler, name: str) -> None:
    """Any text passes, and calls that are right."""
    shape = FORMATS[name].shape
    assert isinstance(shape, Shape)
    constraint = structural(shape.optional(TOOLS, parallel=True))
    assert accepts(compiler, constraint, "It is noon.")
    assert accepts(compiler, constraint, written(name, PARIS))
    assert accepts(compiler, constraint, "Let me look. " + written(name, PARIS))
    assert not accepts(compiler, constraint, written(name, ("get_weather", '{"city": 12}')))
    assert not accepts(compiler, constraint, written(name, ("other", "{}")))


@pytest.mark.parametrize(
    ("at", "passing", "failing"),
    [
        (Thinking.OPEN, ["Hm.</think>{}", "\nHm.\n</think>\n\n{}", "<think>Hm.</think>{}"], ["{}", "Hm."]),
        (Thinking.POSSIBLE, ["{}", "<think>Hm.</think>\n\n{}"], ["Hm.</think>{}"]),
        (Thinking.OVER, ["{}"], ["<think>Hm.</think>{}"]),
    ],
)
def test_a_constrained_model_may_think_first(
    compiler: xgrammar.GrammarCompiler, at: Thinking, passing: list[str], failing: list[str]
) -> None:
    """The grammar holds what comes behind the thinking."""
    constraint = structural(behind_thinking(at, json_schema({"type": "object", "properties": {}})))
    for text in passing:
        assert accepts(compiler, constraint, text)
    for text in failing:
        assert not accepts(compiler, constraint, text)


# What all of it comes to.


def test_an_ordinary_chat_is_not_read(smollm2: Served) -> None:
    """Without tools and thinking, text is content and costs nothing."""
    reading = plan_answer(settings(), smollm2, chat(), [1])
    assert reading.plain
    assert (reading.constraint, reading.markers) == (None, frozenset())


def test_a_model_that_thinks_is_read_without_tools(qwen: Served) -> None:
    """Unless a setting says that it does not."""
    reading = plan_answer(settings(), qwen, chat(), [1])
    assert not reading.plain
    assert reading.markers == frozenset({"<think>", "</think>"})
    assert plan_answer(settings(reasoning_parser="none"), qwen, chat(), [1]).plain


@pytest.mark.parametrize("parser", ["none", "pythonic"])
def test_formats_that_cannot_be_held(smollm2: Served, parser: str) -> None:
    """A required call comes as JSON then; strict optional ones are refused, as they could not be kept."""
    chosen = settings(tool_call_parser=parser)
    reading = plan_answer(chosen, smollm2, chat(tools=[TIME], tool_choice="required"), [1])
    assert reading.constraint is not None
    assert "parameters" in reading.constraint.structural_tag
    with pytest.raises(Unsupported) as caught:
        plan_answer(chosen, smollm2, chat(tools=[WEATHER, function(strict=True)]), [1])
    assert caught.value.param == ("tool_choice" if parser == "none" else "tools[1].function.strict")


def test_what_strict_means(qwen: Served, compiler: xgrammar.GrammarCompiler) -> None:
    """A required call fits its schema unless strict is false; a tool without parameters takes none."""
    for tool, arguments, fits in (
        (WEATHER, '{"town": 1}', False),
        ({**WEATHER, "function": {**WEATHER["function"], "strict": False}}, '{"town": 1}', True),
        (TIME, '{"town": 1}', False),
        (TIME, "{}", True),
    ):
        reading = plan_answer(settings(), qwen, chat(tools=[tool], tool_choice="required"), [1])
        assert reading.constraint is not None
        text = written("hermes", (tool["function"]["name"], arguments))
        assert accepts(compiler, reading.constraint, text) == fits


def test_settings_and_detection_name_every_format() -> None:
    """Each format has a name that settings accept, and each name has a format."""
    assert set(TOOL_FORMATS) == set(FORMATS)
