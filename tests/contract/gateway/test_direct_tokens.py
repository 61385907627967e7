"""Tokens that go straight from the scheduler's stream to the client's connection."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from gateway.answers.chunks import ChatChunks
from gateway.answers.sequence_text import Delta
from gateway.http.protocol import BodyWriter
from tests.support.gateway.serving import CHAT, TEXT, Stack, running_stack

pytestmark = pytest.mark.contract


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(TEXT) as stack:
        yield stack


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Returns the parts of bodies that took the short way; filled as they are written."""
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


async def test_plain_tokens_take_the_short_way(stack: Stack, written: list[bytes]) -> None:
    """All plain tokens but the first go straight to the connection, and the answer is whole."""
    chunks = await stack.stream("/v1/chat/completions", CHAT)
    assert text_of(chunks) == TEXT
    assert text_of([json.loads(part.removeprefix(b"data: ")) for part in written]) in TEXT
    assert len(written) >= len(chunks) - 5, "the opening, the first, the last, the end and [DONE]"


@pytest.mark.parametrize("extra", [{"stop": ["never"]}, {"logprobs": True}])
async def test_other_tokens_do_not(stack: Stack, written: list[bytes], extra: dict[str, object]) -> None:
    """Stop strings and log-probabilities need more than a token's text."""
    assert text_of(await stack.stream("/v1/chat/completions", {**CHAT, **extra})) == TEXT
    assert not written


async def test_usage_and_metrics_count_them(stack: Stack, written: list[bytes]) -> None:
    """Tokens that take the short way are counted and timed like the others."""
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
