"""Clients that disconnect, over real HTTP and real gRPC."""

import asyncio
import json

import pytest

from tests.support.gateway.serving import CHAT, Stack

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_disconnects_cancels_its_request(stack: Stack, path: str, streamed: bool) -> None:
    """The abort reaches the scheduler, streamed or not."""
    stack.scheduler.pause_after = 3
    body = json.dumps(
        {"prompt": "x", "stream": streamed} if path == "/v1/completions" else {**CHAT, "stream": streamed}
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
    writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
    await stack.scheduler.until(lambda: bool(stack.scheduler.requests))
    if streamed:
        await reader.readuntil(b"data: ")
    writer.close()
    await stack.scheduler.until(lambda: stack.scheduler.aborted == [stack.scheduler.requests[0].request_id])
