"""Streams that have nothing to say for a time: what keeps proxies from closing them."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from protos.errors import Internal
from tests.support.gateway.fake_scheduler import FakeScheduler, serving
from tests.support.gateway.serving import (
    CHAT,
    TEXT,
    Gateway,
    Stack,
    running_gateway,
    running_stack,
    smollm2_folder,
)

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
    """The interval changes nothing for requests that are refused at once."""
    stack.scheduler.refuse = lambda _: Internal("on purpose")
    response = await stack.http.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert response.status_code == 500


async def test_a_client_that_leaves_before_the_first_token_ends_its_request(stack: Stack) -> None:
    """It has got comments, and nothing else."""
    stack.scheduler.pause_after = 0
    async with stack.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        await until_alive(response.aiter_lines(), COMMENT)
    await stack.scheduler.until(lambda: len(stack.scheduler.aborted) == 1)


@contextlib.asynccontextmanager
async def waiting_gateway(
    **changes: Any,
) -> AsyncIterator[tuple[Gateway, FakeScheduler, int, httpx.AsyncClient]]:
    """Runs a gateway that has no scheduler yet; yields it, a scheduler to serve, its port, and a client."""
    scheduler = FakeScheduler(smollm2_folder(), [504, 505, 2])
    async with serving(scheduler) as server:
        port = server.port
    async with (
        running_gateway(
            port, wait=False, sse_keep_alive_interval=0.02, model_poll_s=0.1, **changes
        ) as gateway,
        httpx.AsyncClient(base_url=gateway.base_url, timeout=20) as http,
    ):
        yield gateway, scheduler, port, http


async def test_streams_that_wait_for_the_first_model_get_comments() -> None:
    """Their answers follow in the same response, whatever the protocol; the others wait for their status."""
    async with waiting_gateway() as (gateway, scheduler, port, http), contextlib.AsyncExitStack() as calls:
        plain = asyncio.create_task(http.post(PROTOCOLS[0][0], json=CHAT))
        waiting = []
        for path, body, _, last in PROTOCOLS:
            call = http.stream("POST", path, json={**body, "stream": True})
            response = await calls.enter_async_context(call)
            lines = response.aiter_lines()
            assert response.status_code == 200
            await until_alive(lines, COMMENT)
            waiting.append((lines, last))
        assert not plain.done()
        async with serving(scheduler, port):
            assert (await plain).status_code == 200
            for lines, last in waiting:
                rest = [line async for line in lines if line]
                assert last in rest[-1]
        assert len(gateway.client.startup_queue) == 0


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        (PROTOCOLS[0][0], PROTOCOLS[0][1], 'data: {"error":{"message":"no worker became ready within'),
        (PROTOCOLS[1][0], PROTOCOLS[1][1], 'data: {"error":{"message":"no worker became ready within'),
        (
            PROTOCOLS[2][0],
            PROTOCOLS[2][1],
            'data: {"type":"error","sequence_number":0,"code":"service_unavailable"',
        ),
        (PROTOCOLS[3][0], PROTOCOLS[3][1], 'data: {"type":"error","error":{"type":"overloaded_error"'),
    ],
)
async def test_a_stream_that_waits_for_a_model_in_vain_ends_with_an_error(
    path: str, body: dict[str, Any], error: str
) -> None:
    """The error is an event in the protocol's form, and the log has it."""
    async with waiting_gateway(park_timeout_s=0.1) as (_, _, _, http):
        with capture_logs() as logs:
            response = await http.post(path, json={**body, "stream": True})
        assert response.status_code == 200
        assert error in response.text
        assert [line["error"] for line in logs if line["event"] == "request"] == ["service_unavailable"]
