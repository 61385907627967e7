"""Clients that go away, over real HTTP and real gRPC."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.gateway.serving import Stack, running_stack

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

TEXT = "Paris is the capital of France. It lies on the Seine."
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Stack]:
    async with running_stack(TEXT, max_body_bytes=100_000, max_prompts=4) as stack:
        yield stack


@pytest.fixture
def stack(running: Stack) -> Stack:
    running.peer.reset()
    return running


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_cancels_its_request(stack: Stack, path: str, streamed: bool) -> None:
    """The abort reaches the scheduler, whether or not the answer was streamed."""
    stack.peer.pause_after = 3
    body = json.dumps(
        {"prompt": "x", "stream": streamed} if path == "/v1/completions" else {**CHAT, "stream": streamed}
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
    writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
    await stack.peer.until(lambda: bool(stack.peer.requests))
    if streamed:
        await reader.readuntil(b"data: ")
    writer.close()
    await stack.peer.until(lambda: stack.peer.aborted == [stack.peer.requests[0].request_id])


async def test_a_client_that_leaves_before_the_first_token(stack: Stack) -> None:
    """Also while the prompt is still being computed."""
    stack.peer.pause_after = 0
    body = json.dumps({"prompt": "x", "stream": True})
    _, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
    writer.write(
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
    )
    await stack.peer.until(lambda: bool(stack.peer.requests))
    writer.close()
    await stack.peer.until(lambda: bool(stack.peer.aborted))
