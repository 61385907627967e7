"""Tokens that go straight from the scheduler's stream to the client's connection."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from gateway.generation.sequence_text import Delta
from gateway.http.protocol import BodyWriter
from gateway.openai.chunks import ChatChunks
from tests.support.gateway.serving import CHAT, TEXT, Stack, running_stack

pytestmark = pytest.mark.contract


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(TEXT) as stack:
        yield stack


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Returns the parts of bodies that went straight to the connection; filled as they are written."""
    parts: list[bytes] = []
    write = BodyWriter.write

    def record(self: BodyWriter, part: bytes) -> None:
        parts.append(part)
        write(self, part)

    monkeypatch.setattr(BodyWriter, "write", record)
    return parts


def text_of(chunks: list[object]) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for chunk in chunks
        if isinstance(chunk, dict)
        for choice in chunk["choices"]
    )


@pytest.mark.parametrize("extra", [{}, {"stop": ["never"]}, {"logprobs": True}])
async def test_tokens_go_straight_to_the_connection(
    stack: Stack, written: list[bytes], extra: dict[str, object]
) -> None:
    """Nearly all events of a stream go to the connection as they come, and the answer is whole."""
    chunks = await stack.stream("/v1/chat/completions", {**CHAT, **extra})
    assert text_of(chunks) == TEXT
    events = b"".join(written).split(b"\n\n")[:-1]
    assert text_of([json.loads(event.removeprefix(b"data: ")) for event in events]) in TEXT
    assert len(events) >= len(chunks) - 5, "the opening, the first, the last, the end and [DONE]"


async def test_usage_and_metrics_count_them(stack: Stack, written: list[bytes]) -> None:
    """Tokens that go straight to the connection are counted like those of a collected answer."""
    body = {**CHAT, "stream_options": {"include_usage": True}}
    usage = (await stack.stream("/v1/chat/completions", body))[-2]["usage"]
    collected = (await stack.http.post("/v1/chat/completions", json=CHAT)).json()["usage"]
    assert written
    assert usage == collected


async def test_a_failure_ends_its_stream_alone(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that cannot be written ends its stream with an error; another stream goes on."""
    write, calls = ChatChunks.write, 0

    def fail_once(self: ChatChunks, delta: Delta) -> bytes:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("on purpose")
        return write(self, delta)

    monkeypatch.setattr(ChatChunks, "write", fail_once)
    stack.scheduler.step_s = 0.002
    streams = await asyncio.gather(*(stack.stream("/v1/chat/completions", CHAT) for _ in range(2)))
    failed = [any(isinstance(chunk, dict) and "error" in chunk for chunk in chunks) for chunks in streams]
    assert sorted(failed) == [False, True]
    assert text_of(streams[failed.index(False)]) == TEXT
