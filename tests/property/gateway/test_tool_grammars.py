"""Calls of random tools: the grammar of a format accepts them, and its parser reads them in any pieces."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.openai.chat import CollectedMessage
from gateway.parsers.formats import FORMATS, LIST, Format
from gateway.parsers.machine import CallParser
from gateway.parsers.writing import Call, write
from gateway.tools.grammar import Callee, either, json_schema, optional, required, structural
from tests.support.gateway.tool_requests import accepts
from tests.support.parsers.writer import Tools, tools_and_calls
from tests.support.property_settings import scaled

pytestmark = pytest.mark.property

ENTRIES = {**FORMATS, "list": LIST}


def read(form: Format, tools: Tools, pieces: list[str]) -> list[Call]:
    parser = CallParser(form, tools)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    message = CollectedMessage.from_events(events)
    assert "".join(message.content).strip() == ""
    calls = [call["function"] for call in message.calls.values()]
    return [Call(call["name"], json.loads(call["arguments"])) for call in calls]


@pytest.mark.parametrize("name", ENTRIES)
@scaled(16)
@given(data=st.data())
def test_calls_are_accepted_and_read(name: str, data: st.DataObject) -> None:
    form = ENTRIES[name]
    tools, calls = data.draw(tools_and_calls(form))
    text = write(form, calls)
    callees = [Callee(*tool) for tool in tools.items()]
    answer = json_schema({"type": "object", "properties": {"answer": {"type": "integer"}}})
    for tag in (
        required(form, callees, parallel=True),
        optional(form, callees, parallel=True),
        either(form, callees, answer, parallel=True),
    ):
        assert accepts(structural(tag), text)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    borders = sorted({0, len(text), *cuts})
    assert read(form, tools, [text[start:end] for start, end in itertools.pairwise(borders)]) == calls
    assert read(form, tools, list(text)) == calls


@pytest.mark.parametrize("name", ENTRIES)
@scaled(8)
@given(data=st.data())
def test_incomplete_calls_are_refused(name: str, data: st.DataObject) -> None:
    """A call without a required argument is none, nor is one with an argument that its tool does not take."""
    form = ENTRIES[name]
    tools, (call, *_) = data.draw(tools_and_calls(form))
    callees = [Callee(*tool) for tool in tools.items()]
    schema = tools[call.name]
    wrong = [{**call.arguments, "unknown_": 1}]
    wrong += [
        {key: value for key, value in call.arguments.items() if key != missing}
        for missing in schema["required"]
    ]
    for tag in (required(form, callees, parallel=True), optional(form, callees, parallel=True)):
        constraint = structural(tag)
        for arguments in wrong:
            assert not accepts(constraint, write(form, [Call(call.name, arguments)]))
