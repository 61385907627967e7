"""Parsers of answers.

The result does not depend on how the text is cut, and no part of a marker is content.
"""

import itertools
import json
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.generation.answer_plan import AnswerReader
from gateway.openai.chat import CollectedMessage
from gateway.parsers import events
from gateway.parsers.formats import FORMATS, LIST
from gateway.parsers.json_scan import ValueScanner
from gateway.parsers.machine import CallParser
from gateway.parsers.parser_base import NamedToolParser
from gateway.parsers.reasoning import THINKING_FORMATS, Thinking, ThinkParser

pytestmark = pytest.mark.property

NAMES = dict.fromkeys(("f", "get_weather"))

# Building blocks of answers, valid and invalid, joined at random.
WORDS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "abc123def", "<|python_tag|>",
    "<|python_start|>", "<|python_end|>", '{"name": "f", "arguments": ', '{"name": "f", "parameters": ', '{"arguments": {"x": 1}, "name": "f"}',
    '{"name": "unknown", "parameters": {}}', "{}", '{"a": [1, 2.5e3, true, null], "b": {"c": "d\\n\\u00e9\\""}}', '{"city": "Pa', 'ris"}', "}", "]",
    "[", ",", ";", " ", "\n", "\n\n", "f", "get_weather", "(", ")", "f(a=1, b='x', c=[1, {'y': None}])", "get_weather()", 'f(a="(")', "f(a=g())",
    "hello", "<", "<tool", "[TOOL", "{", '"', "\\", "-", "0", "01", "1e", "tru", "é", "🙂", '{"name": 5}', '{"name": "", "arguments": {}}',
    "<function=f>", "<parameter=a>", "</parameter>", "</function>", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.f:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", '<invoke name="f">', "</invoke>", '<parameter name="a">',
    "<|tool_call>call:f{", '<|"|>', "a:", "<tool_call|>", "]<]minimax[>[", ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">', "<a>", "</a>", "</",
    '{"name": "f", "arguments": {"q": "<tool_call></tool_call>[TOOL_CALLS]"}}', "<tool_call>\n", "\n</tool_call>", '{"name": "f"}', "'", "=",
]  # fmt: skip

THOUGHTS = [
    " ", "\n", "a b", "<", "Here", "hello", "<tool_call>", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "</tool_call>",
    '{"name": "f", "parameters": {}}', '<|python_tag|>{"name": "f", "parameters": {"a": "</think>"}}', "<|python_tag|>",
]  # fmt: skip

PARSERS: dict[str, Callable[[], events.ToolParser]] = {
    **{name: partial(CallParser, form, NAMES) for name, form in FORMATS.items()},
    "list": lambda: CallParser(LIST, NAMES),
    "named": lambda: NamedToolParser(events.call_id, "f"),
}

texts = st.lists(st.sampled_from(WORDS), max_size=14).map("".join)
cuts = st.lists(st.integers(0, 400), max_size=30)


def pieces(text: str, at: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(cut for cut in at if cut < len(text))})
    return [text[start:end] for start, end in itertools.pairwise(borders)]


def without_ids(found: list[events.Event]) -> list[events.Event]:
    return [event._replace(id="") if isinstance(event, events.CallStart) else event for event in found]


def read(reader: AnswerReader, parts: list[str]) -> list[events.Event]:
    found = [event for part in parts for event in reader.feed(part)]
    return without_ids(events.merged([*found, *reader.finish()]))


@pytest.mark.parametrize("name", PARSERS)
@given(text=texts, at=cuts, thinking=st.sampled_from([None, *Thinking]), one=st.booleans())
def test_pieces_add_up_to_the_whole(
    name: str, text: str, at: list[int], thinking: Thinking | None, one: bool
) -> None:
    """Every cut, including single characters, yields the same events as the whole text."""

    def reader() -> AnswerReader:
        return AnswerReader(ThinkParser(thinking) if thinking else None, PARSERS[name](), one_call=one)

    whole = without_ids(reader().whole(text))
    assert read(reader(), pieces(text, at)) == whole
    assert read(reader(), list(text)) == whole


@pytest.mark.parametrize("name", THINKING_FORMATS)
@given(
    data=st.data(),
    at=cuts,
    thinking=st.sampled_from(Thinking),
    calls=st.sampled_from(["hermes", "llama3_json", None]),
)
def test_pieces_of_thinking_add_up_to_the_whole(
    name: str, data: st.DataObject, at: list[int], thinking: Thinking, calls: str | None
) -> None:
    """Also with markers that are cut or in the wrong place, and with calls within thoughts."""
    form = THINKING_FORMATS[name]
    markers = [*form.texts(), form.start, form.end]
    words = [*markers, *(marker[:-1] for marker in markers), *(marker[1:] for marker in markers), *THOUGHTS]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=10)))
    triggers = [FORMATS[calls].trigger or "<|python_tag|>"] if calls else []

    def reader() -> AnswerReader:
        return AnswerReader(ThinkParser(thinking, form, triggers), PARSERS[calls]() if calls else None)

    whole = without_ids(reader().whole(text))
    assert read(reader(), pieces(text, at)) == whole
    assert read(reader(), list(text)) == whole
    marked = any(marker in text for marker in (*form.texts(), *triggers)) or text != text.strip()
    if not marked and calls is None and not form.answer:
        assert (
            "".join(event.text for event in whole if isinstance(event, events.Text | events.Reasoning))
            == text
        )


@pytest.mark.parametrize("name", [*FORMATS, "list"])
@given(text=texts)
def test_complete_calls_have_arguments(name: str, text: str) -> None:
    """The arguments of a call are a JSON object, unless the text was cut off."""
    found = read(AnswerReader(None, PARSERS[name]()), [text])
    calls = list(CollectedMessage.from_events(found).calls.values())
    for call in calls[:-1]:
        assert isinstance(json.loads(call["function"]["arguments"]), dict)


@pytest.mark.parametrize("name", [*FORMATS, "list"])
@given(text=texts)
def test_nothing_is_lost(name: str, text: str) -> None:
    """Every character is content, part of a call, or part of a marker."""
    found = read(AnswerReader(None, PARSERS[name]()), list(text))
    if not any(isinstance(event, events.CallStart) for event in found):
        assert "".join(event.text for event in found if isinstance(event, events.Text)) == text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(
    value=st.dictionaries(st.text(), json_values, max_size=4),
    at=cuts,
    indent=st.sampled_from([None, 2]),
    ascii_=st.booleans(),
)
def test_any_arguments_come_through_every_json_format(
    value: dict[str, object], at: list[int], indent: int | None, ascii_: bool
) -> None:
    written = json.dumps(value, indent=indent, ensure_ascii=ascii_)
    for name, text in {
        "hermes": f'Well.\n<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>\n',
        "llama3_json": f'{{"name": "f", "parameters": {written}}}',
        "mistral": f'[TOOL_CALLS] [{{"name": "f", "arguments": {written}}}]',
        "mistral_v11": f"[TOOL_CALLS]f{written}",
        "mistral_v13": f"[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{written}",
        "list": f'[{{"name": "f", "parameters": {written}}}]',
        "named": written,
    }.items():
        message = CollectedMessage.from_events(read(AnswerReader(None, PARSERS[name]()), pieces(text, at)))
        (call,) = message.calls.values()
        assert call["function"] == {"name": "f", "arguments": written}
        assert "".join(message.content) == ("Well." if name == "hermes" else "")


@given(value=st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), json_values, max_size=4), at=cuts)
def test_any_arguments_come_through_the_pythonic_format(value: dict[str, object], at: list[int]) -> None:
    text = "[f(" + ", ".join(f"{key}={item!r}" for key, item in value.items()) + "), get_weather()]"
    message = CollectedMessage.from_events(read(AnswerReader(None, PARSERS["pythonic"]()), pieces(text, at)))
    first, second = message.calls.values()
    assert json.loads(first["function"]["arguments"]) == value
    assert second["function"] == {"name": "get_weather", "arguments": "{}"}


@given(
    text=st.text(st.sampled_from('{}[]",:0123.eE+-truefalsn \\/"u\n'), max_size=40)
    | json_values.map(json.dumps)
)
def test_the_scanner_agrees_with_pythons_json(text: str) -> None:
    """The scanner accepts what RFC 8259 accepts, and ends where the value ends."""
    scanner = ValueScanner()
    at = sum(
        scanner.feed(char)
        for char in itertools.takewhile(lambda _: not scanner.done and not scanner.failed, text + " ")
    )
    try:
        _, end = json.JSONDecoder(parse_constant=lambda _: 1 / 0).raw_decode(text.lstrip(" \n"))
    except (ValueError, ZeroDivisionError):
        # Text that is cut off may still become JSON.
        assert not scanner.done
        return
    assert scanner.done or scanner.failed
    if scanner.done:
        assert at == end + len(text) - len(text.lstrip(" \n"))
