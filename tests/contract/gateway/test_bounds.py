"""Clients that read too slowly, send too slowly or too much, or are too many."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
from pydantic import SecretStr

from gateway.http.protocol import MAX_PIPELINED
from protos.service.backpressure import TENANT
from tests.support.gateway.fake_scheduler import FakeScheduler, serving
from tests.support.gateway.serving import Gateway, running_gateway, smollm2_folder
from tests.support.waiting import until

pytestmark = pytest.mark.contract


@contextlib.asynccontextmanager
async def stack(**changes: Any) -> AsyncIterator[tuple[FakeScheduler, Gateway]]:
    """Runs a gateway with changed settings over a fake scheduler that never ends an answer by itself."""
    scheduler = FakeScheduler(smollm2_folder(), [504, 505], max_model_len=10**7, eos=0)
    async with serving(scheduler) as server, running_gateway(server.port, **changes) as gateway:
        yield scheduler, gateway


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, head: str, body: str = "", headers: str = "", length: int | None = None) -> None:
        """Sends a request, or as much as ``body`` has of it."""
        length = len(body) if length is None else length
        lines = f"{head} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {length}\r\n\r\n"
        self.writer.write((lines + body).encode())

    async def rest(self) -> bytes:
        """Returns all that the gateway sends until it closes the connection."""
        async with asyncio.timeout(30):
            return await self.reader.read()


@contextlib.asynccontextmanager
async def connected(gateway: Gateway, *, reads: bool = True) -> AsyncIterator[Client]:
    """Opens a connection of a client that reads nothing by itself unless it ``reads``."""
    connection = socket.socket()
    if not reads:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", gateway.port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 30 if reads else 1)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def completion(max_tokens: int, **fields: Any) -> str:
    return json.dumps({"prompt": "x", "max_tokens": max_tokens, "stream": True, **fields})


async def test_a_client_that_does_not_read_is_cut_off() -> None:
    """Its request is aborted, so that neither unsent bytes nor unread events pile up."""
    async with stack(write_timeout_s=0.3) as (scheduler, gateway):
        scheduler.tokens_per_event = 1000
        async with connected(gateway, reads=False) as client:
            client.send("POST /v1/completions", completion(9_000_000))
            await scheduler.until(lambda: len(scheduler.aborted) == 1)
        assert gateway.client.num_pending == 0


async def test_an_answer_that_is_not_read_ends() -> None:
    """Its request is aborted, long before --write-timeout-s; the client finds the error when it reads on."""
    async with stack(max_unread_answer_bytes=500_000) as (scheduler, gateway):
        scheduler.tokens_per_event, scheduler.step_s = 200, 0.001
        async with connected(gateway, reads=False) as client:
            client.send("POST /v1/completions", completion(9_000_000), "connection: close\r\n")
            await scheduler.until(lambda: len(scheduler.aborted) == 1)
            assert b"--max-unread-answer-bytes" in await client.rest()
        assert gateway.client.num_pending == 0
        metrics = gateway.app.state.context.metrics.text()
        assert b"triptych:gateway_slow_readers_total 1.0" in metrics
        assert b"triptych:gateway_unread_bytes 0.0" in metrics


async def test_a_large_answer_that_is_not_read_ends() -> None:
    """What waits in its connection counts as well; the connection ends long before --write-timeout-s."""
    async with stack(max_unread_answer_bytes=500_000) as (_, gateway):
        unread = gateway.app.state.context.unread
        body = json.dumps({"prompt": "1 " * 240_000, "return_token_strs": True})
        async with connected(gateway, reads=False) as client:
            client.send("POST /tokenize", body)
            await until(lambda: unread.num_ended == 1)
            with contextlib.suppress(ConnectionError):
                assert len(await client.rest()) < 20 * len(body)
        assert (unread.num_tokens, unread.behind) == (0, set())


async def test_a_client_that_reads_is_not_cut_off() -> None:
    """A stream may take longer and be larger than what is allowed to a client that does not read."""
    async with (
        stack(write_timeout_s=0.05, max_unread_answer_bytes=500_000) as (scheduler, gateway),
        connected(gateway) as client,
    ):
        scheduler.tokens_per_event, scheduler.step_s = 200, 0.02
        client.send("POST /v1/completions", completion(20_000), "connection: close\r\n")
        assert b"[DONE]" in await client.rest()
        assert scheduler.aborted == []


@pytest.mark.parametrize("before", [b"", b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"])
async def test_a_late_head(before: bytes) -> None:
    """A client that sends half of a request's head gets 408, on a new connection and on a used one."""
    async with stack(read_timeout_s=0.2) as (_, gateway), connected(gateway) as client:
        client.writer.write(before)
        if before:
            await client.reader.readuntil(b"}")
        client.writer.write(b"GET /version HTTP/1.1\r\nhost:")
        assert (await client.rest()).startswith(b"HTTP/1.1 408 ")


async def test_a_connection_without_a_request() -> None:
    async with stack(read_timeout_s=0.2) as (_, gateway), connected(gateway) as client:
        with contextlib.suppress(ConnectionError):
            assert await client.rest() == b""


async def test_a_late_body() -> None:
    """A client that sends half of a body gets 408 as an OpenAI error, and the connection is closed."""
    async with stack(read_timeout_s=0.2) as (scheduler, gateway), connected(gateway) as client:
        client.send("POST /v1/completions", completion(5), length=1000)
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert json.loads(body)["error"]["code"] == "request_timeout"
        assert scheduler.requests == []


async def test_bodies_of_a_tenant_leave_memory_for_others() -> None:
    """Half of a tenant's bodies get 429, finished or not; those of another have room, and memory is freed."""
    limits = {"max_body_bytes": 100_000, "max_total_body_bytes": 400_000}
    body = completion(5, unknown="a" * 90_000)
    async with stack(**limits) as (scheduler, gateway), contextlib.AsyncExitStack() as clients:
        bodies = gateway.app.state.context.bodies

        async def sends(tenant: str, text: str, length: int | None = None) -> Client:
            client = await clients.enter_async_context(connected(gateway))
            client.send("POST /v1/completions", text, f"x-tenant: {tenant}\r\nconnection: close\r\n", length)
            return client

        for count in (1, 2):
            await sends("a", body, 100_000)
            await until(lambda count=count: bodies.num_bytes == count * len(body))  # type: ignore[misc]
        head, _, text = (await (await sends("a", body)).rest()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 429 ")
        assert b"retry-after: 1" in head.lower()
        assert "--max-total-body-bytes" in json.loads(text)["error"]["message"]
        assert bodies.num_bytes == 2 * len(body)
        assert b"[DONE]" in await (await sends("b", body)).rest()
        assert len(scheduler.requests) == 1
        await clients.aclose()
        await until(lambda: bodies.num_bytes == 0)
        assert b"[DONE]" in await (await sends("a", body)).rest()


async def test_small_bodies_of_a_tenant_have_room_when_another_fills_memory() -> None:
    limits = {"max_body_bytes": 10_000, "max_total_body_bytes": 30_000}
    async with stack(**limits) as (_, gateway), contextlib.AsyncExitStack() as clients:
        for _ in range(20):
            client = await clients.enter_async_context(connected(gateway))
            client.send("POST /v1/completions", "a" * 5_000, "x-tenant: a\r\n", 10_000)
        bodies = gateway.app.state.context.bodies
        await until(lambda: bodies.num_bytes == 15_000)
        other = await clients.enter_async_context(connected(gateway))
        other.send("POST /v1/completions", completion(5), "x-tenant: b\r\nconnection: close\r\n")
        assert b"[DONE]" in await other.rest()


async def test_large_half_sent_bodies_leave_room_for_small_ones_of_their_tenant() -> None:
    limits = {"max_body_bytes": 1_000_000, "max_total_body_bytes": 4_000_000}
    async with stack(**limits) as (_, gateway), contextlib.AsyncExitStack() as clients:
        for _ in range(4):
            client = await clients.enter_async_context(connected(gateway))
            client.send("POST /v1/completions", "a" * 990_000, length=1_000_000)
        bodies = gateway.app.state.context.bodies
        await until(lambda: bodies.num_bytes == 990_000)
        other = await clients.enter_async_context(connected(gateway))
        other.send("POST /v1/completions", completion(5, unknown="a" * 200_000), "connection: close\r\n")
        assert b"[DONE]" in await other.rest()


async def test_texts_of_a_tenant_leave_places_for_others() -> None:
    text, go = json.dumps({"prompt": "ab " * 30_000}), threading.Event()
    async with stack(max_waiting_texts=4) as (_, gateway), contextlib.AsyncExitStack() as clients:
        clients.callback(go.set)

        async def occupies() -> None:
            TENANT.set("bob")
            await gateway.app.state.context.text_worker.run(len(text) // 8, go.wait)

        async def sends(tenant: str) -> Client:
            client = await clients.enter_async_context(connected(gateway))
            client.send("POST /tokenize", text, f"x-tenant: {tenant}\r\nconnection: close\r\n")
            return client

        running = [asyncio.create_task(occupies()) for _ in range(4)]
        await asyncio.sleep(0)
        assert (await (await sends("bob")).rest()).startswith(b"HTTP/1.1 429 ")
        of_alice = await sends("alice")
        go.set()
        assert (await of_alice.rest()).startswith(b"HTTP/1.1 200 ")
        await asyncio.gather(*running)


async def test_a_client_that_leaves_within_its_body() -> None:
    """It counts as a client that left, not as a fault of the gateway."""
    async with stack() as (_, gateway):
        async with connected(gateway) as client:
            client.send("POST /v1/completions", completion(5), length=1000)
            await client.writer.drain()
        counted = b'http_requests_total{handler="/v1/completions",method="POST",status='
        metrics = b""
        async with asyncio.timeout(10):
            while counted not in metrics:
                async with connected(gateway) as other:
                    other.writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                    metrics = await other.rest()
        assert counted + b'"499"} 1.0' in metrics


async def test_a_late_pipelined_head_does_not_cut_an_answer() -> None:
    async with stack(read_timeout_s=0.1) as (scheduler, gateway), connected(gateway) as client:
        scheduler.pause_after = 3
        client.send("POST /v1/completions", completion(9))
        await client.reader.readuntil(b"data: ")
        client.writer.write(b"GET /version HTTP/1.1\r\nhost:")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.4):
                await client.reader.readuntil(b"[DONE]")
        await scheduler.resume()
        assert b"[DONE]" in await client.rest()


OFFER = "connection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAEAAEAA\r\nupgrade: h2c\r\n"


@pytest.mark.parametrize("cuts", [(), (30,), (95,), (-1,), (30, 95, -20, -1)])
async def test_an_offer_of_another_protocol_is_declined(cuts: tuple[int, ...]) -> None:
    """Java's client makes one with each first request, whose body is neither lost nor a second request."""
    async with stack() as (scheduler, gateway), connected(gateway) as client:
        body = completion(1)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{OFFER}content-length: {len(body)}\r\n\r\n"
        data = (head + body).encode()
        for begin, end in pairwise((0, *(cut % len(data) for cut in cuts), len(data))):
            client.writer.write(data[begin:end])
            await asyncio.sleep(0.01)
        await client.reader.readuntil(b"[DONE]")
        client.writer.write(f"GET /version HTTP/1.1\r\nhost: x\r\n{OFFER}\r\n".encode() * 20)
        client.writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await client.rest()).count(b"HTTP/1.1 200") == 21
        assert len(scheduler.requests) == 1


async def test_a_tunnel_is_refused() -> None:
    async with stack() as (_, gateway), connected(gateway) as client:
        client.writer.write(
            b"CONNECT a:1 HTTP/1.1\r\nhost: x\r\n\r\nGET /version HTTP/1.1\r\nhost: x\r\n\r\n"
        )
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1") == 1


async def test_bytes_that_are_no_http_get_an_error_of_the_api() -> None:
    """In its JSON, unless an answer has begun: then the connection ends, and nothing is written into it."""
    async with stack() as (scheduler, gateway):
        async with connected(gateway) as client:
            client.writer.write(b"NO HTTP\r\n\r\n")
            head, _, body = (await client.rest()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ")
            assert b"content-type: application/json" in head
            assert json.loads(body)["error"]["type"] == "invalid_request_error"
        scheduler.pause_after = 1
        async with connected(gateway) as client:
            client.send("POST /v1/completions", completion(8))
            await client.reader.readuntil(b"data: ")
            client.writer.write(b"NO HTTP\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert b"400" not in await client.rest()


CHUNKED = "POST {} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_trailers_are_no_headers() -> None:
    """A proxy that checks X-Tenant checks headers; a trailer must not pass for one."""
    async with stack() as (scheduler, gateway), connected(gateway) as client:
        body = completion(1)
        chunks = f"{len(body):x}\r\n{body}\r\n0\r\nx-tenant: other\r\n\r\n"
        client.writer.write((CHUNKED.format("/v1/completions") + chunks).encode())
        await client.reader.readuntil(b"[DONE]")
        assert scheduler.requests[0].tenant == ""


@pytest.mark.parametrize(
    "part", [b"0\r\n" + b"x-more: 1\r\n" * 9999, b"0\r\nx: " + b"y" * 99_999, b"0;" + b"y" * 99_999]
)
async def test_bytes_that_are_no_body_are_bounded(part: bytes) -> None:
    """Endless trailers would fill the memory, also behind the refusal of a client without a key."""
    async with stack(api_key=(SecretStr("key"),)) as (_, gateway), connected(gateway) as client:
        client.writer.write(CHUNKED.format("/v1/completions").encode())
        assert b" 401 " in await client.reader.readuntil(b"}")
        with contextlib.suppress(ConnectionError):
            client.writer.write(part)
            assert b"HTTP" not in await client.rest()


async def test_the_rest_of_a_body_behind_its_answer_has_a_time() -> None:
    """Refused clients that go on with a body, byte by byte, would hold connections forever."""
    async with (
        stack(read_timeout_s=0.2, api_key=(SecretStr("key"),)) as (_, gateway),
        connected(gateway) as client,
    ):
        client.send("POST /v1/completions", length=1000)
        assert b" 401 " in await client.reader.readuntil(b"}")
        rest = asyncio.create_task(client.reader.read())
        async with asyncio.timeout(5):
            while not rest.done():
                client.writer.write(b" ")
                await asyncio.wait((rest,), timeout=0.05)
        assert isinstance(rest.exception(), ConnectionError) or b"HTTP" not in rest.result()


async def test_pipelined_bodies() -> None:
    """The end of an answer drops its own request's body, not that of the next request."""
    async with stack() as (_, gateway), connected(gateway) as client:
        client.send("POST /tokenize", json.dumps({"prompt": "one"}))
        client.send("POST /tokenize", json.dumps({"prompt": "two"}), "connection: close\r\n")
        assert (await client.rest()).count(b"HTTP/1.1 200 ") == 2


async def test_too_many_pipelined_requests() -> None:
    """They would wait in the gateway's memory, one connection's in hundreds of megabytes."""
    async with stack() as (scheduler, gateway), connected(gateway) as client:
        scheduler.pause_after = 1
        client.send("POST /v1/completions", completion(9))
        await client.reader.readuntil(b"data: ")
        with contextlib.suppress(ConnectionError):
            client.writer.write(b"GET /load HTTP/1.1\r\nhost: x\r\n\r\n" * (MAX_PIPELINED + 1))
            await client.rest()
        await scheduler.until(lambda: len(scheduler.aborted) == 1)


async def test_a_client_that_leaves_with_a_request_behind_its_stream() -> None:
    """The stream's request is aborted, although it is not the connection's newest one."""
    async with stack() as (scheduler, gateway):
        scheduler.step_s = 0.01
        async with connected(gateway) as client:
            client.send("POST /v1/completions", completion(9_000_000))
            client.send("GET /load")
            await client.reader.readuntil(b"data: ")
        await scheduler.until(lambda: len(scheduler.aborted) == 1)
        metrics = gateway.app.state.context.metrics
        await until(lambda: not metrics.num_in_flight)
        # It did not end because something could not be written.
        assert b"internal_error" not in metrics.text()


async def test_too_many_connections() -> None:
    """One connection too many gets 503 with Retry-After, and works once another is closed."""
    async with stack(max_connections=2) as (_, gateway), connected(gateway) as first:
        async with connected(gateway) as second:
            for client in (first, second):
                client.send("GET /version")
                assert (await client.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
            async with connected(gateway) as third:
                third.send("GET /version")
                head, _, body = (await third.rest()).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 503 ")
                assert b"retry-after: 1" in head
                assert json.loads(body)["error"]["code"] == "service_unavailable"
        async with asyncio.timeout(10):
            while True:
                async with connected(gateway) as third:
                    third.send("GET /version")
                    if (await third.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 "):
                        break
                await asyncio.sleep(0.02)
