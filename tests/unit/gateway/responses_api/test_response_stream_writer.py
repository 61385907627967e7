"""Events of streamed responses in cases that whole gateways rarely reach."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.generation.answer_plan import AnswerReader, DeltaReader
from gateway.generation.generation import Usage
from gateway.generation.sequence_text import Delta, Reporter
from gateway.parsers.events import CallArguments, CallRevoked, CallStart, Event, Reasoning, Text
from gateway.parsers.formats import FORMATS
from gateway.parsers.machine import CallParser
from gateway.responses_api.schemas import ResponsesRequest
from gateway.responses_api.writer import Output, ResponseObject, ResponseStreamWriter, collected
from gateway.schemas.base import parse
from protos.errors import Internal, InvalidArgument, Overloaded, TriptychError

BROKEN = '<tool_call>\n{"name": "get_weather", "arguments": {"city": Paris}}\n</tool_call> Sorry.'


def writer(*, calls: bool = False, logprobs: bool = False) -> ResponseStreamWriter:
    response = ResponseObject(parse(ResponsesRequest, b'{"input": "hi"}'), "resp_1f", 1, "m")
    parsed = DeltaReader(AnswerReader(None, CallParser(FORMATS["hermes"], {"get_weather": None})))
    reporter = Reporter(lambda token: b"%d" % token, wanted=logprobs)
    return ResponseStreamWriter(response, parsed if calls else None, reporter)


def read(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(block.partition("\ndata: ")[2]) for block in data.decode().split("\n\n")[:-1]]


@pytest.mark.parametrize("cut", [1, 5, len(BROKEN)])
def test_a_malformed_call_that_was_announced_is_incomplete(cut: int) -> None:
    """Its text goes on as a message, wherever the text was cut."""
    stream = writer(calls=True)
    data = stream.begin()
    for start in range(0, len(BROKEN), cut):
        reason = "stop" if start + cut >= len(BROKEN) else None
        data += stream.write(Delta(0, BROKEN[start : start + cut], reason))
    events = read(data + stream.end(Usage(1, 2, 0)))
    output = events[-1]["response"]["output"]
    calls = [item for item in output if item["type"] == "function_call"]
    assert [item["status"] for item in calls] == ["incomplete"]
    assert output[-1]["content"][0]["text"].endswith("Sorry.")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Internal("broken"), "server_error"),
        (Overloaded("full"), "rate_limit_exceeded"),
        (InvalidArgument("bad grammar"), "invalid_prompt"),
    ],
)
def test_errors_end_a_stream_at_any_point(error: TriptychError, code: str) -> None:
    stream = writer()
    started = read(stream.begin() + stream.write(Delta(0, "Hello")))
    event, failed = read(stream.error(error))
    assert (event["type"], event["message"]) == ("error", error.message)
    assert event["sequence_number"] == len(started)
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"] == {"code": code, "message": error.message}
    assert failed["response"]["output"][0]["content"][0]["text"] == "Hello"


def test_text_survives_the_framing() -> None:
    stream, text = writer(), 'a "b"\n\ndata: %d \\ \u2028 日本\x00.'
    events = read(stream.begin() + stream.write(Delta(0, text)) + stream.write(Delta(0, text, "stop")))
    assert [event["delta"] for event in events if event["type"].endswith(".delta")] == [text, text]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], [("message", "")]),
        ([Text("a"), Text("b")], [("message", "ab")]),
        (
            [Reasoning("r"), Text("a"), CallStart(0, "c", "f"), CallArguments(0, "{}"), Text("b")],
            [("reasoning", "r"), ("message", "a"), ("function_call", "{}"), ("message", "b")],
        ),
        (
            [Text("a"), CallStart(0, "c", "f"), CallArguments(0, "{"), CallRevoked(0, "<x>{"), Text("b")],
            [("message", "a<x>{b")],
        ),
    ],
)
def test_a_collected_answer_has_the_items_of_its_events(
    events: Sequence[Event], expected: list[tuple[str, str]]
) -> None:
    """In their order; a revoked call is text, and an answer without anything is an empty message."""
    output = collected(Output("resp_1f", {}), events, [])
    assert [(item.body("completed")["type"], item.text) for item in output.items] == expected
    assert len({item.id for item in output.items}) == len(expected)
