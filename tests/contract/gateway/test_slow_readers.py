"""HTTP clients that read their answers more slowly than these come."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.gateway.fake_scheduler import FakeScheduler, serving
from tests.support.gateway.serving import Gateway, running_gateway, smollm2_folder

pytestmark = pytest.mark.contract


@contextlib.asynccontextmanager
async def stack(**changes: Any) -> AsyncIterator[tuple[FakeScheduler, Gateway]]:
    """Runs a gateway with changed settings over a fake scheduler that never ends an answer by itself."""
    scheduler = FakeScheduler(smollm2_folder(), [504, 505], max_model_len=10**7, eos=0)
    scheduler.tokens_per_event, scheduler.step_s = 200, 0.001
    async with serving(scheduler) as server, running_gateway(server.port, **changes) as gateway:
        yield scheduler, gateway


@contextlib.asynccontextmanager
async def asked(
    gateway: Gateway, max_tokens: int, *, reads: bool = False
) -> AsyncIterator[asyncio.StreamReader]:
    """Asks for a streamed answer; yields its reader, which reads nothing by itself unless it `reads`."""
    with socket.socket() as connection:
        if not reads:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", gateway.port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 30 if reads else 1)
        body = json.dumps({"prompt": "x", "max_tokens": max_tokens, "stream": True})
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
        )
        yield reader
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def rest(reader: asyncio.StreamReader) -> bytes:
    """Returns what is left of an answer."""
    async with asyncio.timeout(30):
        return await reader.read()


async def metrics_of(gateway: Gateway) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    text = await rest(reader)
    writer.close()
    await writer.wait_closed()
    return text


async def test_an_answer_that_is_not_read_ends() -> None:
    """Its request is aborted, long before --write-timeout-s; the client finds the error when it reads on."""
    async with (
        stack(max_unread_answer_bytes=500_000) as (scheduler, gateway),
        asked(gateway, 9_000_000) as answer,
    ):
        await scheduler.until(lambda: len(scheduler.aborted) == 1)
        text = await rest(answer)
        assert b"--max-unread-answer-bytes" in text
        assert gateway.client.num_pending == 0
        metrics = await metrics_of(gateway)
        assert b"triptych:gateway_slow_readers_total 1.0" in metrics
        assert b"triptych:gateway_unread_bytes 0.0" in metrics


async def test_a_client_that_reads_gets_more_than_may_wait() -> None:
    """Only what waits is bounded."""
    async with (
        stack(max_unread_answer_bytes=500_000) as (scheduler, gateway),
        asked(gateway, 20_000, reads=True) as answer,
    ):
        scheduler.step_s = 0.02
        assert b"[DONE]" in await rest(answer)
        assert scheduler.aborted == []
