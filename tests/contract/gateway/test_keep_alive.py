"""Streams that have nothing to say for a time: what keeps proxies from closing them."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from protos.errors import Internal
from tests.support.gateway.serving import CHAT, TEXT, Stack, running_stack

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

COMMENT = ": keep-alive"
MESSAGES = {"messages": CHAT["messages"], "max_tokens": 30, "model": "smollm2"}
PING = 'data: {"type":"ping"}'

# Path, body, what keeps the stream alive, and a part of its last event.
PROTOCOLS: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/chat/completions", CHAT, COMMENT, "[DONE]"),
    ("/v1/completions", {"prompt": "x", "logprobs": 1}, COMMENT, "[DONE]"),
    ("/v1/responses", {"input": "hi"}, COMMENT, "response.completed"),
    ("/v1/messages", MESSAGES, PING, "message_stop"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Stack]:
    async with running_stack(TEXT, sse_keep_alive_interval=0.02) as stack:
        yield stack


def said(lines: list[str]) -> str:
    """Returns the text in the events of any of the protocols."""
    return "".join(re.findall(r'"(?:content|text|delta)":"([^"]*)"', "\n".join(lines)))


async def until_alive(lines: AsyncIterator[str], sign: str, times: int = 2) -> list[str]:
    """Reads lines until ``sign`` has come a number of times."""
    found: list[str] = []
    async with asyncio.timeout(10):
        async for line in lines:
            found.append(line)
            if found.count(sign) == times:
                break
    return found


@pytest.mark.parametrize(("path", "body", "sign", "last"), PROTOCOLS)
async def test_an_idle_stream_gets_comments(
    stack: Stack, path: str, body: dict[str, Any], sign: str, last: str
) -> None:
    """Comments come before the first token and between tokens, in the protocol's form."""
    stack.scheduler.pause_after = 0
    async with stack.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        begun = await until_alive(lines, sign)
        assert not said(begun)
        stack.scheduler.pause_after = 3
        async with stack.scheduler.changed:
            stack.scheduler.changed.notify_all()
        half = await until_alive(lines, sign, 3)
        await stack.scheduler.resume()
        rest = [line async for line in lines if line]
    assert said(half)
    assert TEXT in said([*half, *rest])
    assert last in rest[-1]


@pytest.mark.parametrize(
    ("path", "body", "sign", "error"),
    [
        (PROTOCOLS[0][0], PROTOCOLS[0][1], COMMENT, '{"error":{"message":"on purpose"'),
        (PROTOCOLS[2][0], PROTOCOLS[2][1], COMMENT, "response.failed"),
        (PROTOCOLS[3][0], PROTOCOLS[3][1], PING, "event: error"),
    ],
)
async def test_an_error_after_a_comment_is_an_event(
    stack: Stack, path: str, body: dict[str, Any], sign: str, error: str
) -> None:
    """The status line has been sent, so that the error arrives in the stream and ends it."""
    stack.scheduler.pause_after = 0
    async with stack.http.stream("POST", path, json={**body, "stream": True}) as response:
        lines = response.aiter_lines()
        await until_alive(lines, sign)
        stack.gateway.client.fail_all(Internal("on purpose"))
        assert error in "\n".join([line async for line in lines])


async def test_a_refusal_before_the_first_comment_has_its_status(stack: Stack) -> None:
    stack.scheduler.refuse = lambda _: Internal("on purpose")
    response = await stack.http.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert response.status_code == 500


async def test_a_client_that_leaves_before_the_first_token_ends_its_request(stack: Stack) -> None:
    """It has got comments, and nothing else."""
    stack.scheduler.pause_after = 0
    async with stack.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        await until_alive(response.aiter_lines(), COMMENT)
    await stack.scheduler.until(lambda: len(stack.scheduler.aborted) == 1)
