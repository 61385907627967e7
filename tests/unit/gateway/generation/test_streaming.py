"""Chunks of streamed answers, byte for byte."""

import json
from functools import partial
from typing import Any

import pytest

from gateway.generation.answer_reader import AnswerReader
from gateway.generation.generation import Usage
from gateway.generation.logprobs import Reporter, TokenReport
from gateway.generation.sequence_text import Delta
from gateway.openai.chunks import (
    DONE,
    ChatChunks,
    ChatStreamWriter,
    Chunks,
    ChunkWriter,
    CompletionChunks,
    last_error,
)
from gateway.parsers.reasoning import Thinking, ThinkParser
from protos.errors import Unavailable


def read(data: bytes) -> list[dict[str, Any]]:
    """Returns the objects of some events; checks the framing."""
    events = data.decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def make(cls: type[Chunks], *, with_usage: bool = False) -> Chunks:
    return cls("id-1", 1_700_000_000, "smol", with_usage=with_usage)


@pytest.mark.parametrize(
    "text", ["a", 'quote " backslash \\', "line\nbreak", "日本 🇫🇷", "\u2028", "\x00", "data: x\n\n"]
)
@pytest.mark.parametrize("cls", [ChatChunks, CompletionChunks])
def test_text_survives_the_framing(cls: type[Chunks], text: str) -> None:
    """No text can break out of its event."""
    (chunk,) = read(make(cls).write(Delta(0, text)))
    choice = chunk["choices"][0]
    assert (choice["delta"]["content"] if cls is ChatChunks else choice["text"]) == text


def test_chat_chunks() -> None:
    """A chat stream has the role first, then text, then an empty delta with the reason."""
    chunks = make(ChatChunks)
    (opening,) = read(chunks.opening(0))
    assert opening == {
        "id": "id-1", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "smol",
        "choices": [{
            "index": 0, "delta": {"role": "assistant", "content": "", "refusal": None},
            "logprobs": None, "finish_reason": None,
        }],
    }  # fmt: skip
    last_text, end = read(chunks.write(Delta(0, "bye", "length")))
    assert last_text["choices"][0]["delta"] == {"content": "bye"}
    assert last_text["choices"][0]["finish_reason"] is None
    assert end["choices"][0]["delta"] == {}
    assert end["choices"][0]["finish_reason"] == "length"
    assert len(read(chunks.write(Delta(0, "", "stop")))) == 1


def test_completion_chunks() -> None:
    """A completion stream has no role, and the reason comes with the last text."""
    chunks = make(CompletionChunks)
    assert chunks.opening(0) == b""
    (end,) = read(chunks.write(Delta(3, "bye", "stop", "END")))
    assert end["object"] == "text_completion"
    assert end["choices"] == [
        {"index": 3, "text": "bye", "logprobs": None, "finish_reason": "stop", "stop_reason": "END"}
    ]


@pytest.mark.parametrize("cls", [ChatChunks, CompletionChunks])
def test_an_empty_delta_writes_nothing(cls: type[Chunks]) -> None:
    """Text that is held back makes no chunk."""
    assert make(cls).write(Delta(0, "")) == b""


@pytest.mark.parametrize("cls", [ChatChunks, CompletionChunks])
def test_usage_is_null_until_its_chunk(cls: type[Chunks]) -> None:
    """With usage requested, every chunk says null, and the last one has no choices."""
    chunks = make(cls, with_usage=True)
    assert read(chunks.write(Delta(0, "a")))[0]["usage"] is None
    (last,) = read(chunks.usage({"total_tokens": 3}))
    assert last["choices"] == []
    assert last["usage"] == {"total_tokens": 3}
    assert "usage" not in read(make(cls).write(Delta(0, "a")))[0]


@pytest.mark.parametrize("cls", [ChatChunks, CompletionChunks])
def test_usage_may_come_with_every_chunk(cls: type[Chunks]) -> None:
    """continuous_usage_stats puts the usage so far into each chunk."""
    chunks = make(cls, with_usage=True)
    chunks.set_usage({"total_tokens": 2})
    chunks.set_usage({"total_tokens": 3})
    (chunk,) = read(chunks.write(Delta(1, "a")))
    assert chunk["usage"] == {"total_tokens": 3}
    assert chunk["choices"][0]["index"] == 1


def test_errors_and_the_end() -> None:
    """An error in mid-stream is OpenAI's error object, and the end follows it."""
    error = last_error(Unavailable("gone"))
    assert read(error.removesuffix(b"data: [DONE]\n\n"))[0]["error"]["message"] == "gone"
    assert error.endswith(DONE)


@pytest.mark.parametrize("with_usage", [True, False])
def test_a_stream_opens_each_choice_once_and_ends_with_its_usage(with_usage: bool) -> None:
    """Each opening comes with its choice's first delta, and the usage, if asked for, just before the end."""
    chunks, usage = make(ChatChunks, with_usage=with_usage), Usage(2, 3, 0)
    writer = ChunkWriter(chunks, chunks.write, with_usage=with_usage)
    assert writer.begin() == b""
    for choice in (0, 1):
        roles = [chunk["choices"][0]["delta"].get("role") for chunk in read(writer.write(Delta(choice, "a")))]
        assert roles == ["assistant", None]
        assert len(read(writer.write(Delta(choice, "b")))) == 1
    end = writer.end(usage)
    assert end.endswith(DONE)
    assert [chunk["usage"] for chunk in read(end.removesuffix(DONE))] == [usage.body()] * with_usage
    assert writer.error(Unavailable("gone")) == last_error(Unavailable("gone"))


def test_parsed_chunks_report_every_token_once() -> None:
    """Tokens without visible text are reported with the next chunk."""
    reading = partial(AnswerReader, ThinkParser(Thinking.POSSIBLE), None, one_call=False, show_thinking=True)
    chunks = ChatChunks(
        "id-1", 1, "smol", with_usage=False, reporter=Reporter(lambda token_id: bytes([token_id]))
    )
    stream = ChatStreamWriter(chunks, reading, named=False)
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
