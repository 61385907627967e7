"""Blocks, stop reasons and events that a fake scheduler cannot bring about."""

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.generation.answer_plan import AnswerPlan
from gateway.generation.generation import Generation, Usage
from gateway.generation.sequence_text import Delta, Reporter
from gateway.generation.streaming import AnswerHead
from gateway.messages_api.schemas import MessageAnswer
from gateway.messages_api.writer import MessageStreamWriter, message_body
from gateway.parsers.events import CallArguments, CallRevoked, CallStart, Event, Reasoning, Text
from gateway.schemas.sampling import SamplingRequest

USAGE = Usage(10, 5, 3, 2)
START = CallStart(0, "call_1", "f")
HEAD = AnswerHead(
    "msg_1",
    0,
    "m",
    "fp",
    SamplingRequest(stream=True),
    cast("Generation", SimpleNamespace(usage=USAGE)),
    Reporter(lambda _: b""),
)


class Script:
    """A parser that finds the same events, one list per piece of text, whatever the text is."""

    def __init__(self, *events: Sequence[Event]) -> None:
        self._events = list(events)

    def feed(self, _: str) -> list[Event]:
        return list(self._events.pop(0))

    def finish(self) -> list[Event]:
        return []

    def whole(self, _: str) -> list[Event]:
        return [event for events in self._events for event in events]


def streamed(*events: Sequence[Event], reason: str = "stop") -> list[dict[str, Any]]:
    """Returns the events of a stream whose parser finds ``events``."""
    plan = AnswerPlan(calls=lambda: Script(*events, []))
    writer = MessageStreamWriter(HEAD, plan, omit_thinking=False)
    data = writer.begin() + b"".join(writer.write(Delta(0, "x")) for _ in events)
    data += writer.write(Delta(0, "", reason)) + writer.end(USAGE)
    return [json.loads(event.partition("data: ")[2]) for event in data.decode().split("\n\n")[:-1]]


def body(*events: Event, **end: Any) -> MessageAnswer:
    delta = Delta(0, "", "stop")._replace(**end)
    return message_body(HEAD, delta, events, USAGE, omit_thinking=False)


def test_blocks_keep_their_order() -> None:
    """Pieces of one block are joined; a revoked call is text again, with what stands around it."""
    call: list[Event] = [START, CallArguments(0, '{"x"'), CallArguments(0, ": 1}")]
    content = body(Reasoning("a"), Text("b"), Text("c"), *call, Text("d"))["content"]
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use", "text"]
    assert (content[1]["text"], content[2]["input"], content[3]["text"]) == ("bc", {"x": 1}, "d")
    revoked = body(Text("b"), START, CallArguments(0, "{"), CallRevoked(0, "<call>"), Text("d"))
    assert "".join(block.get("text") or "" for block in revoked["content"]) == "b<call>d"
    assert revoked["stop_reason"] == "end_turn"
    assert body()["content"] == [{"type": "text", "text": ""}]


def test_a_call_that_is_cut_off_has_no_input() -> None:
    """Its input is an object in any case, and the reason says that it is none to run."""
    cut = body(START, CallArguments(0, '{"x'), finish_reason="length")
    assert (cut["content"][0]["input"], cut["stop_reason"]) == ({}, "max_tokens")


@pytest.mark.parametrize(
    ("end", "arguments", "expected"),
    [
        (("length", None), "{}", ("max_tokens", None)),
        (("stop", None), "{}", ("tool_use", None)),
        (("stop", "x"), "{}", ("tool_use", None)),
        (("stop", "x"), "{", ("stop_sequence", "x")),
        (("stop", "x"), None, ("stop_sequence", "x")),
        (("stop", 7), None, ("end_turn", None)),
        (("stop", None), "{", ("tool_use", None)),
    ],
)
def test_stop_reasons(
    end: tuple[str, str | int | None], arguments: str | None, expected: tuple[str, str | None]
) -> None:
    """The limit wins over calls, and complete calls win over stop sequences."""
    events: list[Event] = [] if arguments is None else [START, CallArguments(0, arguments)]
    answer = body(*events, finish_reason=end[0], stop_reason=end[1])
    assert (answer["stop_reason"], answer["stop_sequence"]) == expected


def test_arguments_may_come_late() -> None:
    """Parsers of vLLM may mix calls and text: each piece of arguments names its own block."""
    events = streamed([START], [CallArguments(0, "{"), Text("b")], [CallArguments(0, "}")])
    starts = {event["index"]: event["content_block"]["type"] for event in events if "content_block" in event}
    assert starts == {0: "tool_use", 1: "text"}
    whole = body(START, CallArguments(0, "{"), Text("b"), CallArguments(0, "}"))["content"]
    assert [block["type"] for block in whole] == ["tool_use", "text"]
    pieces = [event for event in events if event.get("delta", {}).get("type") == "input_json_delta"]
    assert [(event["index"], event["delta"]["partial_json"]) for event in pieces] == [(0, "{"), (0, "}")]


def test_a_revoked_call_is_none_to_run() -> None:
    """A stream cannot take its block back, but it does not end with ``tool_use``."""
    events = streamed([START], [CallArguments(0, "{")], [CallRevoked(0, "x")])
    assert events[-2]["delta"]["stop_reason"] == "end_turn"
