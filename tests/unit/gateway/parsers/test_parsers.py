"""Each format is read as its documentation shows it; malformed calls are content."""

import time
from typing import Any

import pytest

from gateway.generation.answer_plan import AnswerReader
from gateway.openai.answers import AssistantMessage, finish_reason
from gateway.openai.chat import CollectedMessage
from gateway.parsers.events import CallArguments, CallRevoked, CallStart, Event, Text
from gateway.parsers.formats import FORMATS, LIST
from gateway.parsers.json_scan import MAX_DEPTH
from gateway.parsers.machine import CallParser
from gateway.parsers.parser_base import NamedToolParser
from gateway.parsers.reasoning import Thinking, ThinkParser

NAMES = dict.fromkeys(("get_weather", "get_time", "from_to"))
PARIS = '{"city": "Paris"}'


FORMATS_AND_LIST = {**FORMATS, "list": LIST}


def reader(name: str, **options: Any) -> AnswerReader:
    return AnswerReader(None, CallParser(FORMATS_AND_LIST[name], NAMES), **options)


def read(name: str, text: str) -> tuple[str | None, list[tuple[str, Any]]]:
    """Returns the content and calls of a whole text.

    Checks that streaming character by character gives the same.
    """
    whole = CollectedMessage.from_events(reader(name).whole(text))
    streaming = reader(name)
    streamed = CollectedMessage.from_events(
        [*(event for char in text for event in streaming.feed(char)), *streaming.finish()]
    )
    found = [_without_ids(message.body(with_reasoning=False)) for message in (whole, streamed)]
    assert found[0] == found[1]
    return found[0]


def _without_ids(body: AssistantMessage) -> tuple[str | None, list[tuple[str, Any]]]:
    calls = [call["function"] for call in body.get("tool_calls", [])]
    return body["content"], [(call["name"], call["arguments"]) for call in calls]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        # The layout of Qwen and Hermes, with and without line breaks, with text before, between and behind.
        ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', None, [("get_weather", PARIS)]),
        ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>', None, [("get_weather", PARIS)]),
        (
            "hermes",
            'Let me look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\n',
            "Let me look.",
            [("get_weather", PARIS), ("get_time", "{}")],
        ),
        # An end marker inside a string is part of the string; a missing end marker is accepted.
        ("hermes", '<tool_call>{"name": "f", "arguments": {"q": "</tool_call>"}}</tool_call> Done.', "Done.", [("f", '{"q": "</tool_call>"}')]),
        ("hermes", '<tool_call>\n{"name": "get_time", "arguments": {}}', None, [("get_time", "{}")]),
        ("hermes", '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_', None, [("get_time", "{}")]),
        # Llama: parameters or arguments, several calls separated by semicolons or lines, with and without the
        # marker.
        ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', None, [("get_weather", PARIS)]),
        ("llama3_json", '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}', None, [("get_weather", PARIS)]),
        ("llama3_json", '<|python_tag|>{"name": "elsewhere", "arguments": {}}', None, [("elsewhere", "{}")]),
        (
            "llama3_json",
            '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}};',
            None,
            [("get_weather", PARIS), ("get_time", "{}")],
        ),
        ("llama3_json", '{"name": "get_time", "parameters": {}}\n{"name": "get_time", "parameters": {}}', None, [("get_time", "{}")] * 2),
        ("llama3_json", '{"name": "get_time", "parameters": {}} , {"name": "get_time", "parameters": {}}', None, [("get_time", "{}")] * 2),
        ("llama3_json", '{"name": "get_time", "parameters": {}}, and so on', ", and so on", [("get_time", "{}")]),
        # An answer that ends with the beginning of a marker ends with text.
        ("llama3_json", '{"name": "get_time", "parameters": {}} <', "<", [("get_time", "{}")]),
        ("llama3_json", '{"name": "get_time", "parameters": {}}, <|pyth', ", <|pyth", [("get_time", "{}")]),
        ("llama3_json", '<|python_tag|>{"name": "get_time", "parameters": {}}\n<|python_tag|', "<|python_tag|", [("get_time", "{}")]),
        ("llama3_json", '{"name": "get_time", "parameters": {}} ; ', None, [("get_time", "{}")]),
        ("llama3_json", '{"name": "get_time", "parameters": {}};;{}', ";;{}", [("get_time", "{}")]),
        ("llama3_json", 'Sure: <|python_tag|>{"name": "get_time", "parameters": {}}', "Sure:", [("get_time", "{}")]),
        # Mistral: the list of old tokenizers, and names before arguments in newer ones.
        ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]', None, [("get_weather", PARIS)]),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, {"arguments": {}, "name": "get_time"}]',
            None,
            [("get_weather", PARIS), ("get_time", "{}")],
        ),
        ("mistral", '[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]get_time{}', None, [("get_weather", PARIS), ("get_time", "{}")]),
        ("mistral", 'Well.[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}', "Well.", [("get_weather", PARIS)]),
        # Pythonic: keyword literals, including JSON's names that Python lacks.
        ("pythonic", "[get_weather(city='Paris')]", None, [("get_weather", PARIS)]),
        ("pythonic", '[get_weather(city="Paris"), get_time()]', None, [("get_weather", PARIS), ("get_time", "{}")]),
        ("pythonic", "<|python_start|>[get_time()]<|python_end|>", None, [("get_time", "{}")]),
        (
            "pythonic",
            "[from_to(from='a(b', to=[1, -2.5, {'x': (True, None, false, null)}], why=\"it's\",)]",
            None,
            [("from_to", '{"from": "a(b", "to": [1, -2.5, {"x": [true, null, false, null]}], "why": "it\'s"}')],
        ),
        # Arguments as a string that contains an object, before or after the name.
        ("hermes", r'<tool_call>{"name": "f", "arguments": "{\"a\": \"b\\n\"}"}</tool_call>', None, [("f", r'{"a": "b\n"}')]),
        ("hermes", r'<tool_call>{"arguments": " {} ", "name": "f"}</tool_call>', None, [("f", " {} ")]),
        ("llama3_json", r'{"name": "get_time", "parameters": "{\"a\": 1}"}', None, [("get_time", '{"a": 1}')]),
        ("mistral", r'[TOOL_CALLS][{"name": "f", "arguments": "{}"}]', None, [("f", "{}")]),
        # A call that a stream has announced stays one. In vLLM, either all of a text is calls or none of it.
        (
            "hermes",
            '<tool_call>{"name": "get_time", "arguments": {}}</tool_call><tool_call>{"name": "f", "arguments": {bad}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": {bad}}</tool_call>',
            [("get_time", "{}")],
        ),
        ("pythonic", "[get_time(), 5]", ", 5]", [("get_time", "{}")]),
        ("pythonic", "[get_time()] and", "and", [("get_time", "{}")]),
        ("pythonic", "[get_time()", None, [("get_time", "{}")]),
        ("llama3_json", '{"name": "get_time", "parameters": {"a": 1', None, [("get_time", '{"a": 1')]),
        # The generic list.
        ("list", '[{"name": "get_weather", "parameters": {"city": "Paris"}}]', None, [("get_weather", PARIS)]),
        ("list", ' [ {"name": "get_time", "parameters": {}} , {"name": "get_time", "parameters": {}} ] ', None, [("get_time", "{}")] * 2),
    ],
)  # fmt: skip
def test_calls(name: str, text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    """Names and arguments come out as the model wrote them; white space around calls is not content."""
    assert read(name, text) == (content, calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "The sign < is less, <tool is nothing, <tool_call too"),
        ("hermes", "<tool_call>not JSON</tool_call>"),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "text"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{} {}"}</tool_call>'),
        ("hermes", r'<tool_call>{"name": "f", "arguments": "{\"a\": NaN}"}</tool_call>'),
        ("hermes", r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\ud800\"}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{'),
        ("hermes", 'Look:\n\n<tool_call>{"name": "f", "arguments": {bad}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {bad}}</tool_call>\n<tool_call>{"name": "f", "arguments": {}}</tool_call> tail'),
        ("mistral", '[TOOL_CALLS]f{bad}[TOOL_CALLS]f{}'),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {bad}}<|python_tag|>{"name": "f", "parameters": {}}'),
        ("list", '[{"name": "f", "parameters": {bad}}, {"name": "f", "parameters": {}}]'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arg'),
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "line\nbreak"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, "arguments": {}}</tool_call>'),
        ("llama3_json", '{"answer": 42}'),
        ("llama3_json", '{"name": "Ada", "parameters": {}}'),
        ("llama3_json", 'Use {"name": "get_time", "parameters": {}} for it.'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("llama3_json", " <|python_tag|>"),
        ("llama3_json", '{"name": "get_time", "parameters": {}, "and": 1}'),
        ("mistral", "[TOOL_CALLS]I have no idea"),
        ("mistral", "[TOOL_CALLS]" + "x" * 300 + "{}"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS"),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[unknown(a=1)]"),
        ("pythonic", "[get_time(1)]"),
        ("pythonic", "[get_time(a=)]"),
        ("pythonic", "[get_time(a=1, a=2)]"),
        ("pythonic", "[get_time(a=open('/etc/passwd').read())]"),
        ("pythonic", "[get_time(a=__import__('os'))]"),
        ("pythonic", "[get_time(a=1e999)]"),
        ("pythonic", "[get_time(a=b'x')]"),
        ("pythonic", "[get_time(**{})]"),
        ("pythonic", "[get_time(a=[)]"),
        ("pythonic", "[get_time(a='"),
        ("pythonic", "[get_time(a='\\ud800')]"),
        ("pythonic", f"[get_time(a={'[' * 100}{']' * 100})]"),
        ("pythonic", "[get_time for get_time in x]"),
        ("list", "I will not call."),
        ("list", "[]"),
        ("list", '[{"name": "get_time"}]'),
    ],
)  # fmt: skip
def test_malformed_calls_are_content(name: str, text: str) -> None:
    """A collected answer shows malformed calls unchanged, even if it may have only one call."""
    assert read(name, text) == (text, [])
    assert _without_ids(
        CollectedMessage.from_events(reader(name, one_call=True).whole(text)).body(with_reasoning=False)
    ) == (text, [])


def test_deeply_nested_arguments_are_content() -> None:
    deep = '{"a": ' * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1)
    text = f'<tool_call>{{"name": "f", "arguments": {deep}}}</tool_call>'
    assert read("hermes", text) == (text, [])
    fine = '{"a": ' * MAX_DEPTH + "1" + "}" * MAX_DEPTH
    assert read("hermes", f'<tool_call>{{"name": "f", "arguments": {fine}}}</tool_call>') == (
        None,
        [("f", fine)],
    )


def test_deltas() -> None:
    """A call is announced when its arguments begin; they follow as they arrive."""
    streaming = reader("hermes")
    assert streaming.feed("Well.\n<tool") == [Text("Well.")]
    assert streaming.feed('_call>\n{"name": "get_w') == []
    (start, arguments) = streaming.feed('eather", "arguments": {"ci')
    assert isinstance(start, CallStart)
    assert (start.number, start.name, arguments) == (0, "get_weather", CallArguments(0, '{"ci'))
    assert start.id.startswith("call_")
    assert streaming.feed('ty": "Paris"}') == [CallArguments(0, 'ty": "Paris"}')]
    assert streaming.feed("}\n</tool_call>") == streaming.finish() == []
    assert streaming.num_calls == 1


def test_a_malformed_call_is_revoked_after_its_announcement() -> None:
    """A stream has already shown the call; the finish reason says that no call stands."""
    streaming = reader("hermes")
    events: list[Event] = streaming.feed('<tool_call>{"name": "f", "arguments": {"a": oops')
    revoked = events[-2]
    assert isinstance(revoked, CallRevoked)
    assert revoked.source == '<tool_call>{"name": "f", "arguments": {"a": '
    assert events[-1] == Text("oops")
    assert streaming.num_calls == 0


def test_a_call_that_is_cut_off_stays_a_call() -> None:
    """max_tokens may cut arguments anywhere; the finish_reason says so."""
    content, calls = read("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, 2')
    assert (content, calls) == (None, [("f", '{"a": [1, 2')])
    assert finish_reason("length", 1, named=False) == "length"


def test_a_further_malformed_call_is_content() -> None:
    """Without parallel calls the client never saw it begin, so a stream shows its text."""
    good, bad = (
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {bad}}',
    )
    only = reader("hermes", one_call=True)
    events = [event for char in good + bad for event in only.feed(char)]
    assert "".join(event.text for event in [*events, *only.finish()] if isinstance(event, Text)) == bad
    assert only.num_calls == 1


def test_a_named_tools_answer_is_its_arguments() -> None:
    parser = NamedToolParser(lambda: "call_1", "f")
    assert parser.feed("\n ") == []
    assert parser.feed(' {"a"') == [CallStart(0, "call_1", "f"), CallArguments(0, '{"a"')]
    assert parser.feed(": 1}") == [CallArguments(0, ": 1}")]
    assert parser.finish() == []


def test_mistrals_ids() -> None:
    """Mistral's templates accept nine letters and digits; a model's own id is kept."""
    for text, expected in (
        ("[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{}", "a1b2c3d4e"),
        ("[TOOL_CALLS]f{}", None),
    ):
        ((_, call),) = CollectedMessage.from_events(reader("mistral").whole(text)).calls.items()
        assert call["id"] == expected or (expected is None and len(call["id"]) == 9 and call["id"].isalnum())


NESTED = '<tool_call>{"name": "f", "arguments": {"a": "'
LONG: dict[str, tuple[str, str, str]] = {
    # The beginning, the repeated text, and the end.
    "nested beginnings": ("hermes", "", NESTED),
    "arguments": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "x"),
    "quoted arguments": ("hermes", '<tool_call>{"name": "f", "arguments": "{', " "),
    "a number": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "1"),
    "blank content": ("hermes", "a", " "),
    "blanks behind a call": ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "\n"),
    "blanks in front of an object": ("hermes", "<tool_call>", " "),
    "a blank beginning": ("llama3_json", "", "\n"),
    "blanks in front of thinking": ("thinking", "", "\n"),
    "blanks within thinking": ("thinking", "<think>a", "\n"),
    "blanks between objects": ("llama3_json", '{"name": "get_time", "parameters": {}};', "\n"),
    "blanks in front of a list": ("list", "", "\n"),
    "blanks within a list": ("list", '[{"name": "f", "parameters": {}}', "\n"),
    "blanks behind a marker": ("mistral", "[TOOL_CALLS]", "\n"),
    "blanks in front of python": ("pythonic", "", "\n"),
    "blanks between python's calls": ("pythonic", "[get_time()", "\n"),
    "blanks in front of python's name": ("pythonic", "[", " "),
    "python's arguments": ("pythonic", '[get_time(a="', "x"),
}


@pytest.mark.parametrize("case", LONG)
def test_a_long_answer_is_read_in_time_that_grows_with_it(case: str) -> None:
    """Parsing is linear even character by character."""
    name, before, repeated = LONG[case]

    def seconds(count: int) -> float:
        text = before + repeated * (count // len(repeated))
        one = AnswerReader(ThinkParser(Thinking.POSSIBLE), None) if name == "thinking" else reader(name)
        started = time.process_time()
        for char in text:
            one.feed(char)
        one.finish()
        return time.process_time() - started

    count = 4000
    assert min(seconds(8 * count) for _ in range(2)) < 20 * min(seconds(count) for _ in range(2))
