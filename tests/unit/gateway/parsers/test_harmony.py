"""Answers of gpt-oss: thinking, content and calls in the channels of harmony, at every cut."""

import pytest

from gateway.parsers.events import (
    CallArguments,
    CallRevoked,
    CallStart,
    Event,
    Reasoning,
    Text,
    merged,
    settled,
)
from gateway.parsers.harmony import HarmonyParser

NAMES = frozenset({"f", "get_weather"})
TO_F = " to=functions.f<|channel|>commentary <|constrain|>json<|message|>"


def feed(parts: list[str], names: frozenset[str], begun: str) -> list[Event]:
    parser = HarmonyParser(lambda: "id", names, begun)
    return merged([*(event for part in parts for event in parser.feed(part)), *parser.finish()])


def read(text: str, names: frozenset[str] = NAMES, begun: str = "assistant") -> list[Event]:
    """Returns the events, which are the same at every cut."""
    whole = feed([text], names, begun)
    assert feed(list(text), names, begun) == whole
    for at in range(1, len(text)):
        assert feed([text[:at], text[at:]], names, begun) == whole, at
    assert merged(HarmonyParser(lambda: "id", names, begun).whole(text)) == whole
    return whole


def call(name: str, arguments: str, number: int = 0) -> list[Event]:
    return [CallStart(number, "id", name), CallArguments(number, arguments)]


@pytest.mark.parametrize(
    ("text", "events"),
    [
        # From OpenAI's documentation: thinking and answer; thinking and a call; a preamble before a call.
        (
            "<|channel|>analysis<|message|>Simple.<|end|>\n<|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|return|>",
            [Reasoning("Simple."), Text("2 + 2 = 4.")],
        ),
        (
            '<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"location":"San Francisco"}<|call|>',
            [Reasoning("Need it."), *call("get_weather", '{"location":"San Francisco"}')],
        ),
        (
            "<|channel|>commentary<|message|>**Plan**<|end|><|start|>assistant<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}<|call|>",
            [Text("**Plan**"), *call("f", "{}")],
        ),
        # The recipient on either side, every way to write the constraint, any channel.
        (' to=functions.f<|channel|>commentary json<|message|>{"a": "<|call|>"}<|call|>', call("f", '{"a": "<|call|>"}')),
        ("<|channel|>analysis to=functions.f code<|message|>{}<|call|>", call("f", "{}")),
        ("<|channel|>final to=functions.f<|message|>{}", call("f", "{}")),
        ("<|channel|>commentary to=functions.f <|constrain|>response<|message|> {} <|call|>", call("f", "{}")),
        ("<|start|>assistant to=functions.f<|channel|>commentary<|message|>{}", call("f", "{}")),
        (" to=functions.f<|message|>{}", call("f", "{}")),
        # A tool of the request without its namespace; an unknown function is still a call.
        (" to=f<|channel|>commentary<|message|>{}", call("f", "{}")),
        (" to=functions.other<|channel|>commentary<|message|>{}", call("other", "{}")),
        # Several calls.
        (f"{TO_F}{{}}<|call|><|start|>assistant{TO_F}{{\"a\": [1]}}<|call|>", [*call("f", "{}"), *call("f", '{"a": [1]}', 1)]),
        # No arguments are empty arguments; the marker that ends the answer is not in the text.
        (TO_F, call("f", "{}")),
        (f"{TO_F} <|call|>", call("f", "{}")),
        (f"{TO_F}<|ca", call("f", "{}")),
        (" to=functions.f<|channel|>commentary<|call|>", call("f", "{}")),
        # A call that is cut off stays a call.
        (f'{TO_F}{{"a": 1', call("f", '{"a": 1')),
        (f"{TO_F}{{}} and<|call|>", [*call("f", "{}"), Text(" and")]),
        # Messages to the built-in tools stay what their channel says.
        ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", [Reasoning("print(1)")]),
        ('<|channel|>commentary to=browser.search code<|message|>{"q": 1}<|call|>', [Text('{"q": 1}')]),
        ("<|channel|>final to=assistant<|message|>Hi<|end|>", [Text("Hi")]),
        # Several messages of a kind.
        (
            "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B<|end|><|start|>assistant<|channel|>final<|message|>C<|end|><|start|>assistant<|channel|>final<|message|><|end|><|start|>assistant<|channel|>final<|message|>D",
            [Reasoning("A\nB"), Text("C\nD")],
        ),
        # Missing markers.
        ("<|channel|>analysis<|message|>A<|start|>assistant<|channel|>final<|message|>B", [Reasoning("A"), Text("B")]),
        ("<|channel|>analysis<|message|>A<|channel|>final<|message|>B", [Reasoning("A"), Text("B")]),
        ("<|channel|>analysis<|message|>A<|end|><|channel|>final<|message|>B", [Reasoning("A"), Text("B")]),
        ("<|message|>A", [Text("A")]),
        # Text outside messages.
        ("Hello, < and <| too.", [Text("Hello, < and <| too.")]),
        ("  to be", [Text("  to be")]),
        ("A<|channel|>final<|message|>B<|end|> C <|end|>", [Text("A\nB\n C ")]),
        # Headers that no message should have are shown, and what follows them.
        ("<|channel|>commentary?<|message|>A<|end|><|start|>assistant<|channel|>final<|message|>B", [Text("<|channel|>commentary?<|message|>A\nB")]),
        ("<|channel|>final__HANDOFF__<|return|>", [Text("<|channel|>final__HANDOFF__")]),
        ("<|channel|>final__HANDOFF__", [Text("<|channel|>final__HANDOFF__")]),
        ("<|channel|>other<|message|>A", [Text("<|channel|>other<|message|>A")]),
        ("<|channel|>final<|end|><|start|>user<|message|>Hi<|end|>", [Text("<|start|>user<|message|>Hi")]),
        ("<|channel|>commentary to=a<|channel|>commentary<|message|>A", [Text("<|channel|>commentary to=a<|channel|>commentary<|message|>A")]),
        ("<|channel|>finaljson<|message|>A", [Text("<|channel|>finaljson<|message|>A")]),
        (f"<|channel|>{'x' * 490}<|message|>A<|channel|>final<|message|>B", [Text(f"<|channel|>{'x' * 490}<|message|>A\nB")]),
        (f"<|channel|>{'x' * 600}<|message|>A<|end|>", [Text(f"<|channel|>{'x' * 600}<|message|>A")]),
        # What is cut off in a marker or header has nothing to show.
        *((text, []) for text in ["", "<|", "<|chan", "<|channel|>", "<|channel|>comm", "<|channel|>commentary to=functions.f", "<|channel|>final <|const", "<|channel|>final<|mess"]),
        ("<|channel|>final<|message|>A<|ret", [Text("A")]),
        ("<|channel|>final<|message|>A <", [Text("A <")]),
        ("t", [Text("t")]),
    ],
)  # fmt: skip
def test_messages(text: str, events: list[Event]) -> None:
    assert read(text) == events


@pytest.mark.parametrize(
    ("body", "after"),
    [("not JSON", ""), ("[1]", ""), ('"{}"', ""), ('{"a": 01}', ""), ("{bad}", ""), ("{bad}", "x")],
)
def test_arguments_that_are_not_json_become_content(body: str, after: str) -> None:
    found = read(f"{TO_F}{body}<|call|>{after}")
    assert settled(found) == [Text(f"{TO_F}{body}" + ("\n" + after if after else ""))]
    assert any(isinstance(event, CallRevoked) for event in found) == body.startswith("{")


def test_without_tools_messages_to_functions_are_content() -> None:
    assert read(f'{TO_F}{{"a": 1}}<|call|>', names=frozenset()) == [Text('{"a": 1}')]


@pytest.mark.parametrize(
    ("begun", "text", "events"),
    [
        ("assistant", "<|channel|>final<|message|>A", [Text("A")]),
        ("assistant<|channel|>analysis<|message|>Let me", " see.<|end|>", [Reasoning(" see.")]),
        ("assistant<|channel|>final<|message|>", "A<|return|>", [Text("A")]),
        ("assistant<|channel|>final<|message|>A", "<|return|>", []),
        ("assistant<|channel|>", "final<|message|>A", [Text("A")]),
        ("assistant<|channel|>commentary", " to=functions.f<|message|>{}", call("f", "{}")),
        ("assistant<|channel|>fin", "ally<|message|>A", [Text("ally<|message|>A")]),
        ("assistant to=functions.f<|channel|>commentary", "<|message|>{}", call("f", "{}")),
        ("user<|message|>Hi<|end|>", "<|start|>assistant<|channel|>final<|message|>A", [Text("A")]),
        ("", "<|start|>assistant<|channel|>final<|message|>A", [Text("A")]),
    ],
)
def test_the_prompt_may_have_begun_a_message(begun: str, text: str, events: list[Event]) -> None:
    assert read(text, begun=begun) == events


def test_text_arrives_as_it_is_written() -> None:
    parser = HarmonyParser(lambda: "id", NAMES)
    parser.feed("<|channel|>analysis<|message|>")
    assert parser.feed("Let me") == [Reasoning("Let me")]
    parser.feed(f" see.<|end|><|start|>assistant{TO_F}")
    assert merged(parser.feed('{"city": "Par')) == call("f", '{"city": "Par')
