"""Each entry of the table reads the text that its models write, however it is cut."""

import time
from typing import Any

import pytest

from gateway.generation.answer_plan import AnswerReader
from gateway.openai.chat import CollectedMessage
from gateway.parsers.events import CallStart
from gateway.parsers.formats import ALIASES, FORMATS
from gateway.parsers.machine import CallParser
from gateway.parsers.values import property_schema, types

TOOLS: dict[str, Any] = {
    "f": {
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "n": {"type": "integer"},
            "o": {"$ref": "#/$defs/o"},
            "m": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "$defs": {"o": {"type": "object"}},
    },
    "g": {},
}
NOTHING = ("g", "{}")
X = ("f", '{"s": "x"}')
FIVE = ("f", '{"s": "5", "n": 5}')

TEXTS: dict[str, tuple[str, str | None, list[tuple[str, str]]]] = {
    "qwen3_coder": (
        (
            "Look.\n\n<tool_call>\n<function=f>\n<parameter=s>\n5 < 6 & </parameter>x\n\n</parameter>\n"
            '<parameter=n>\n12\n</parameter>\n<parameter=o>\n{"a": [1]}\n</parameter>\n'
            "<parameter=m>\nnull\n</parameter>\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=g>\n</function>\n</tool_call>"
        ),
        "Look.",
        [("f", r'{"s": "5 < 6 & </parameter>x\n", "n": 12, "o": {"a": [1]}, "m": null}'), NOTHING],
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function=f>\n<parameter=s>x</parameter>\n</function>\n</seed:tool_call>",
        None,
        [X],
    ),
    "mimo": (
        "<tool_call>\n<function=f>\n<parameter=n>5</parameter>\n</function>\n</tool_call>",
        None,
        [("f", '{"n": 5}')],
    ),
    "glm45": (
        (
            "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>5</arg_value>\n<arg_key>n</arg_key>\n"
            "<arg_value>5</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>"
        ),
        None,
        [FIVE, NOTHING],
    ),
    "glm47": (
        (
            "<tool_call>f<arg_key>s</arg_key><arg_value>5</arg_value><arg_key>n</arg_key>"
            "<arg_value>5</arg_value></tool_call><tool_call>g</tool_call>"
        ),
        None,
        [FIVE, NOTHING],
    ),
    "kimi_k2": (
        (
            "Hi<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
            '{"s": "x"}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>'
            "<|tool_call_end|><|tool_calls_section_end|>"
        ),
        "Hi",
        [X, NOTHING],
    ),
    "kimi_k3": (
        (
            '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
            '<|open|>argument key="s" type="string"<|sep|>5<|close|>argument<|sep|>'
            '<|open|>argument key="n" type="number"<|sep|>5<|close|>argument<|sep|><|close|>call<|sep|>'
            '<|open|>call tool="g" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
        ),
        None,
        [FIVE, NOTHING],
    ),
    "deepseek_v3": (
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
            '{"s": "x"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        None,
        [X, NOTHING],
    ),
    "deepseek_v31": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"s": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        None,
        [X],
    ),
    "deepseek_v32": (
        (
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
            '<｜DSML｜parameter name="s" string="true">5</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="n" string="false">5</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
        ),
        None,
        [FIVE],
    ),
    "minimax_m2": (
        (
            '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">5</parameter>\n'
            '<parameter name="n">5</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>'
        ),
        None,
        [FIVE, NOTHING],
    ),
    "hunyuan": (
        '<tool_calls>[\n{"name": "f", "arguments": {"s": "x"}},\n{"name": "g", "arguments": {}}\n]</tool_calls>',
        None,
        [X, NOTHING],
    ),
    "granite": ('<|tool_call|>[{"name": "f", "arguments": {"s": "x"}}]', None, [X]),
    "phi4_mini": ('functools[{"name": "f", "arguments": {"s": "x"}}]', None, [X]),
    "cohere": (
        (
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"s": "x"}}\n]'
            "<|END_ACTION|>"
        ),
        None,
        [X],
    ),
    "internlm": (
        'Hi<|action_start|><|plugin|>\n{"name": "f", "parameters": {"s": "x"}}<|action_end|>',
        "Hi",
        [X],
    ),
    "xlam": ('[{"name": "f", "arguments": {"s": "x"}}, {"name": "g", "arguments": {}}]', None, [X, NOTHING]),
    "lfm2": ('<|tool_call_start|>[f(s="x"), g()]<|tool_call_end|>Done.', "Done.", [X, NOTHING]),
    "olmo3": ('<function_calls>\nf(s="x")\ng()\n</function_calls>', None, [X, NOTHING]),
    "llama4_pythonic": ('<|python_start|>[f(s="x")]<|python_end|>', None, [X]),
    "pythonic": (
        "x<|python_start|>[f(s='''it's''', o={1: 2})]<|python_end|>",
        "x",
        [("f", '{"s": "it\'s", "o": {"1": 2}}')],
    ),
    "llama3_json": (
        '[{"name": "f", "parameters": {"s": "x"}}, {"name": "g", "parameters": null}]',
        None,
        [X, NOTHING],
    ),
    "mistral_v11": ("[TOOL_CALLS]g[ARGS]", None, [NOTHING]),
    "hermes": ('One <tool_call>{"name": "g", "arguments": null}</tool_call> two', "One  two", [NOTHING]),
}


def read(name: str, text: str, size: int) -> tuple[str | None, list[tuple[str, str]]]:
    reader = AnswerReader(None, CallParser(FORMATS[name], TOOLS))
    events = [event for at in range(0, len(text), size) for event in reader.feed(text[at : at + size])]
    body = CollectedMessage.from_events([*events, *reader.finish()]).body(with_reasoning=False)
    calls = [call["function"] for call in body.get("tool_calls", [])]
    return body["content"], [(call["name"], call["arguments"]) for call in calls]


@pytest.mark.parametrize("name", TEXTS)
def test_texts_of_models(name: str) -> None:
    text, content, calls = TEXTS[name]
    for size in (1, 2, 3, 5, 7, 11, len(text)):
        assert read(name, text, size) == (content, calls), size


def test_ids_of_kimi_stay_as_written() -> None:
    parser = CallParser(FORMATS["kimi_k2"], TOOLS)
    starts = [event.id for event in parser.whole(TEXTS["kimi_k2"][0]) if isinstance(event, CallStart)]
    assert starts == ["functions.f:0", "functions.g:1"]


@pytest.mark.parametrize("name", TEXTS)
def test_a_call_cut_anywhere_is_shown(name: str) -> None:
    """Content and calls show as much as arrived."""
    text, _, calls = TEXTS[name]
    for end in range(1, len(text)):
        content, found = read(name, text[:end], 4)
        assert content or found
        for (called, arguments), (expected, whole) in zip(found, calls, strict=False):
            assert called == expected
            # A cut may be where a text or an object could have ended.
            assert whole.startswith(arguments.rstrip('}"')) or arguments == "{}"


def test_aliases_name_entries() -> None:
    assert set(ALIASES.values()) <= FORMATS.keys()
    assert not ALIASES.keys() & FORMATS.keys()


SLOPPY = [
    # Parameters without their end, and a call after one.
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nx\n</function>\n</tool_call>", [X]),
    (
        "qwen3_coder",
        (
            "<tool_call>\n<function=f>\n<parameter=s>\nx\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=g>\n</function>\n</tool_call>"
        ),
        [X, NOTHING],
    ),
    ("glm47", "<tool_call>f<arg_key>s</arg_key><arg_value>x</tool_call>", [X]),
    # Line breaks of another version of the format.
    (
        "glm47",
        "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
        [X],
    ),
    # A comma after the last call.
    ("hunyuan", '<tool_calls>[{"name": "f", "arguments": {"s": "x"}},]</tool_calls>', [X]),
]


@pytest.mark.parametrize(("name", "text", "calls"), SLOPPY)
def test_sloppy_texts(name: str, text: str, calls: list[tuple[str, str]]) -> None:
    for size in (1, 2, 3, 5, 7, len(text)):
        assert read(name, text, size) == (None, calls), size


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nx</parameter>"),
        ("glm47", "<tool_call>f"),
    ],
)
def test_white_space_without_end_is_read_in_time_that_grows_with_it(name: str, text: str) -> None:
    start = time.process_time()
    read(name, text + " " * 50_000, 1)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    "part", [{"anyOf": 5}, {"allOf": 5}, {"properties": 5}, {"$ref": "#/$defs"}, {"enum": 1}]
)
def test_schemas_that_are_not_valid_give_no_types(part: dict[str, Any]) -> None:
    text = "<tool_call>\n<function=f>\n<parameter=s>\nx\n</parameter>\n</function>\n</tool_call>"
    parser = CallParser(FORMATS["qwen3_coder"], {"f": {"type": "object", **part}})
    assert "".join(getattr(event, "fragment", "") for event in parser.whole(text)) == '{"s": "x"}'


def test_types_of_a_schema_that_branches_into_itself() -> None:
    """Each part is visited once."""
    schema = {
        "anyOf": [{"$ref": "#"}] * 9 + [{"type": "integer"}],
        "properties": {"a": {"$ref": "#/anyOf/9"}},
    }
    assert types(schema, schema)
    assert property_schema(schema, "b", schema) is None
    assert types(property_schema(schema, "a", schema), schema) == {"integer"}
