"""Chunks of streamed answers, byte for byte."""

import json
from functools import partial
from typing import Any, cast

import pytest

from gateway.generation.answer_plan import AnswerPlan
from gateway.generation.generation import Generation
from gateway.generation.sequence_text import Delta, Reporter, TokenReport
from gateway.generation.streaming import AnswerHead
from gateway.openai.answers import ChatChunks, ChunkWriter, CompletionChunks
from gateway.parsers.reasoning import Thinking, ThinkParser
from gateway.schemas.sampling import SamplingRequest


def read(data: bytes) -> list[dict[str, Any]]:
    """Returns the objects of some events; checks the framing."""
    events = data.decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def make(kind: str, plan: AnswerPlan | None = None) -> ChunkWriter:
    body = SamplingRequest(stream=True)
    reporter = Reporter(lambda token_id: bytes([token_id]))
    head = AnswerHead("id-1", 1_700_000_000, "smol", "fp", body, cast("Generation", None), reporter)
    return ChatChunks(head, plan or AnswerPlan()) if kind == "chat" else CompletionChunks(head)


@pytest.mark.parametrize(
    "text", ["a", 'quote " backslash \\', "line\nbreak", "日本 🇫🇷", "\u2028", "\x00", "data: x\n\n"]
)
@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_text_survives_the_framing(kind: str, text: str) -> None:
    chunks = make(kind)
    (choice,) = read(chunks.write(Delta(0, text)))[-1]["choices"]
    assert (choice["delta"]["content"] if kind == "chat" else choice["text"]) == text
    assert chunks.write(Delta(0, "")) == b"", "text that is held back makes no chunk"


def test_parsed_chunks_report_every_token_once() -> None:
    stream = make("chat", plan=AnswerPlan(partial(ThinkParser, Thinking.POSSIBLE)))
    text = "<think>a</think>b"
    events: list[dict[str, Any]] = []
    for index, letter in enumerate(text):
        reason = "stop" if index == len(text) - 1 else None
        reports = (TokenReport(ord(letter), index, -0.5),)
        events += read(stream.write(Delta(0, letter, reason, None, reports)))
    choices = [event["choices"][0] for event in events]
    reported = [
        entry["token"] for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]
    ]
    assert "".join(reported) == text
    assert "".join(choice["delta"].get("reasoning", "") for choice in choices) == "a"
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "b"
    assert choices[-1]["finish_reason"] == "stop"
