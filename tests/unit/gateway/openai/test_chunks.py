"""Chunks of streamed answers, byte for byte."""

import json
from functools import partial
from typing import Any, cast

import pytest

from gateway.generation.answer_plan import AnswerPlan
from gateway.generation.generation import Generation, Usage
from gateway.generation.sequence_text import Delta, Reporter, TokenReport
from gateway.generation.streaming import AnswerHead
from gateway.openai.answers import DONE, ChatChunks, ChunkWriter, CompletionChunks, last_error
from gateway.parsers.reasoning import Thinking, ThinkParser
from gateway.schemas.sampling import SamplingRequest, StreamOptions
from protos.errors import Unavailable

KINDS = pytest.mark.parametrize("kind", ["chat", "completion"])


def read(data: bytes) -> list[dict[str, Any]]:
    """Returns the objects of some events; checks the framing."""
    events = data.decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def make(kind: str, *, with_usage: bool = False, plan: AnswerPlan | None = None) -> ChunkWriter:
    options = StreamOptions(include_usage=True) if with_usage else None
    body = SamplingRequest(stream=True, stream_options=options)
    reporter = Reporter(lambda token_id: bytes([token_id]))
    head = AnswerHead("id-1", 1_700_000_000, "smol", "fp", body, cast("Generation", None), reporter)
    return ChatChunks(head, plan or AnswerPlan()) if kind == "chat" else CompletionChunks(head)


@pytest.mark.parametrize(
    "text", ["a", 'quote " backslash \\', "line\nbreak", "日本 🇫🇷", "\u2028", "\x00", "data: x\n\n"]
)
@KINDS
def test_text_survives_the_framing(kind: str, text: str) -> None:
    """No text can break out of its event."""
    (choice,) = read(make(kind).write(Delta(0, text)))[-1]["choices"]
    assert (choice["delta"]["content"] if kind == "chat" else choice["text"]) == text


def test_chat_chunks() -> None:
    """A chat stream has the role first, then text, then an empty delta with the reason."""
    chunks = make("chat")
    opening, last_text, end = read(chunks.write(Delta(0, "bye", "length")))
    assert opening == {
        "id": "id-1", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "smol",
        "choices": [{
            "index": 0, "delta": {"role": "assistant", "content": "", "refusal": None},
            "logprobs": None, "finish_reason": None,
        }],
    }  # fmt: skip
    assert last_text["choices"][0]["delta"] == {"content": "bye"}
    assert last_text["choices"][0]["finish_reason"] is None
    assert end["choices"][0]["delta"] == {}
    assert end["choices"][0]["finish_reason"] == "length"


def test_completion_chunks() -> None:
    """A completion stream has no role, and the reason comes with the last text."""
    (end,) = read(make("completion").write(Delta(3, "bye", "stop", "END")))
    assert end["object"] == "text_completion"
    assert end["choices"] == [
        {"index": 3, "text": "bye", "logprobs": None, "finish_reason": "stop", "stop_reason": "END"}
    ]


@KINDS
@pytest.mark.parametrize("with_usage", [True, False])
def test_a_stream_opens_each_choice_once_and_ends_with_its_usage(kind: str, with_usage: bool) -> None:
    """Openings come with the first delta; usage is null until its chunk, which has no choices."""
    writer, usage = make(kind, with_usage=with_usage), Usage(2, 3, 0)
    for choice in (0, 1):
        assert len(read(writer.write(Delta(choice, "a")))) == (2 if kind == "chat" else 1)
        (chunk,) = read(writer.write(Delta(choice, "b")))
        assert chunk.get("usage", "absent") == (None if with_usage else "absent")
        assert writer.write(Delta(choice, "")) == b"", "text that is held back makes no chunk"
    end = writer.end(usage)
    assert end.endswith(DONE)
    last = [(chunk["choices"], chunk["usage"]) for chunk in read(end.removesuffix(DONE))]
    assert last == [([], usage.body())] * with_usage


def test_errors_and_the_end() -> None:
    """An error in mid-stream is OpenAI's error object, and the end follows it."""
    error = make("chat").error(Unavailable("gone"))
    assert error == last_error(Unavailable("gone"))
    assert read(error.removesuffix(DONE))[0]["error"]["message"] == "gone"
    assert error.endswith(DONE)


def test_parsed_chunks_report_every_token_once() -> None:
    """Tokens without visible text are reported with the next chunk."""
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
