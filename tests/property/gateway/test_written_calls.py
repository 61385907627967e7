"""Random calls, written as each format's entry says, and messages of gpt-oss, read back at any cut."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.generation.answer_plan import AnswerReader
from gateway.openai.chat import CollectedMessage
from gateway.parsers.events import CallArguments, CallStart, Event, Reasoning, Text, merged
from gateway.parsers.formats import FORMATS
from gateway.parsers.harmony import CHANNEL, END, MARKERS, MESSAGE, START, HarmonyParser
from gateway.parsers.machine import CallParser
from gateway.parsers.writing import Call, write
from tests.property.gateway.test_parsers import cuts, json_values, pieces
from tests.support.parsers.writer import tools_and_calls

pytestmark = pytest.mark.property


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=30)
@given(data=st.data(), at=cuts)
def test_written_calls(name: str, data: st.DataObject, at: list[int]) -> None:
    """Every value comes back: nested ones, quotes, the format's own marks within texts, any characters."""
    form = FORMATS[name]
    tools, calls = data.draw(tools_and_calls(form))
    text = write(form, calls)
    for parts in (pieces(text, at), list(text)):
        reader = AnswerReader(None, CallParser(form, tools))
        events = [*(event for part in parts for event in reader.feed(part)), *reader.finish()]
        message = CollectedMessage.from_events(merged(events))
        functions = [call["function"] for call in message.calls.values()]
        assert [Call(each["name"], json.loads(each["arguments"])) for each in functions] == calls
        assert not "".join(message.content)


# A message of gpt-oss: its kind, its header, and its text or arguments.
_HEADERS = {
    "thought": f"{CHANNEL}analysis{MESSAGE}",
    "preamble": f"{CHANNEL}commentary{MESSAGE}",
    "answer": f"{CHANNEL}final{MESSAGE}",
    "call": f"{CHANNEL}commentary to=functions.f <|constrain|>json{MESSAGE}",
    "other call": f" to=functions.f{CHANNEL}commentary json{MESSAGE}",
}
_texts = st.lists(
    st.sampled_from(["word", " ", "\n", "<", "<|", "|>", "to=f", "{}"]) | st.characters(codec="utf-8")
)
_plain = _texts.map("".join).filter(lambda text: not any(marker in text for marker in MARKERS))
_arguments = st.dictionaries(st.text(), json_values | st.sampled_from(sorted(MARKERS)), max_size=3).map(
    json.dumps
)
_messages = st.lists(
    st.sampled_from(sorted(_HEADERS)).flatmap(
        lambda kind: st.tuples(st.just(kind), _arguments if "call" in kind else _plain)
    ),
    min_size=1,
    max_size=5,
)


@given(messages=_messages, at=cuts)
def test_messages_of_gpt_oss(messages: list[tuple[str, str]], at: list[int]) -> None:
    expected: list[Event] = []
    shown = set[Any]()
    for kind, text in messages:
        if "call" in kind:
            number = sum(isinstance(event, CallStart) for event in expected)
            expected += [CallStart(number, "id", "f"), CallArguments(number, text)]
        elif text:
            part = Reasoning if kind == "thought" else Text
            expected.append(part("\n" * (part in shown) + text))
            shown.add(part)
    # The end of the text is a marker, because a part of one would not be shown.
    text = f"{END}{START}assistant".join(_HEADERS[kind] + text for kind, text in messages) + END
    for parts in (pieces(text, at), list(text)):
        parser = HarmonyParser(lambda: "id", {"f"})
        events = [*(event for part in parts for event in parser.feed(part)), *parser.finish()]
        assert merged(events) == merged(expected)
