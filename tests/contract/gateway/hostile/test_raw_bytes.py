"""Bytes that hypothesis makes up, sent on a socket."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from typing import Final

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.gateway.serving import TEXT, Stack, running_stack
from tests.support.property_settings import scaled

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

MOMENT_S: Final = 0.02
STATUS_LINE: Final = re.compile(rb"HTTP/1\.1 (\d{3}) [A-Z]")
LIVE: Final = b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"

METHODS: Final = [b"POST", b"GET", b"PUT", b"OPTIONS", b"HEAD", b"get", b"CONNECT", b"PRI", b"\x00"]
TARGETS: Final = [
    b"/v1/chat/completions", b"/v1/completions", b"/v1/messages", b"/v1/responses", b"/tokenize", b"/live",
    b"/v1/models/%ff%fe", b"/docs/..%2f", b"/%00", b"//", b"*", b"http://elsewhere/v1/models", b"?", b"/" + b"a" * 9000,
]  # fmt: skip
HEADERS: Final = [
    b"x-request-id: \xff", b"x-tenant: \xff\xfe", b"x-tenant: a\r\nx-tenant: b",
    b"content-encoding: gzip", b"content-type: application/xml", b"authorization: Bearer \xff", b"x-api-key: ",
    b"expect: 100-continue", b"connection: upgrade\r\nupgrade: websocket", b"Host: x\r\nHost: y", b"traceparent: 00-1-2-3",
    b"connection: upgrade, http2-settings\r\nupgrade: h2c", b"cookie: " + b"a=b;" * 2000,
]  # fmt: skip
LENGTHS: Final = [
    b"transfer-encoding: chunked", b"content-length: 5", b"content-length: -1", b"content-length: 99999999999999999999",
    b"content-length: 5\r\ncontent-length: 6", b"transfer-encoding: chunked, chunked", b"transfer-encoding: gzip",
    b": empty", b"name", b" folded: x", b"x: " + b"a" * 70_000, b"content-length: 5\r\ntransfer-encoding: chunked",
]  # fmt: skip
BODIES: Final = [
    b'{"prompt": "x", "max_tokens": 3}', b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": true}',
    b'{"input": "hi", "max_output_tokens": 2}', b"", b"{", b"{}", b"null", b"5", b'{"prompt": "\xff"}', b"[" * 5000,
    b'{"prompt": "x", "max_tokens": 1e400}', b'{"prompt": "\\ud800"}', b'\xef\xbb\xbf{"prompt": "x"}', b'{"prompt":' * 5000,
    b"5\r\nhello\r\n0\r\n\r\n", b"ffffffffffffffff\r\n", b"-1\r\n\r\n",
]  # fmt: skip


@st.composite
def almost_requests(draw: st.DrawFn) -> bytes:
    """Returns a request, or something between one and noise."""
    method = draw(st.just(b"POST") | st.sampled_from(METHODS))
    line = b" ".join([method, draw(st.sampled_from(TARGETS)), b"HTTP/1.1"])
    headers = [b"host: x", b"connection: close", *draw(st.lists(st.sampled_from(HEADERS), max_size=3))]
    body = draw(st.sampled_from(BODIES) | st.binary(max_size=50))
    kind = draw(st.sampled_from(["right", "right", "wrong length", "noise"]))
    headers.append(
        draw(st.sampled_from(LENGTHS)) if kind == "wrong length" else b"content-length: %d" % len(body)
    )
    whole = b"\r\n".join([line, *headers, b"", body])
    if kind != "noise":
        return whole
    at = draw(st.integers(0, len(whole)))
    return whole[:at] + draw(st.binary(max_size=8)) + whole[at + draw(st.integers(0, 8)) :]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Stack]:
    async with running_stack(TEXT, max_parked_requests=0) as stack:
        yield stack


def exchange(port: int, sent: bytes) -> bytes:
    """Sends bytes; returns all that comes back until the server closes.

    A server that waits for more learns after a moment that none will come.
    """
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=MOMENT_S) as connection:
        try:
            connection.sendall(sent)
            while part := _next(connection):
                received += part
        except (ConnectionResetError, BrokenPipeError):
            pass  # the server may cut off a client that still sends
    return received


def _next(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except TimeoutError:
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(10)
        return connection.recv(65536)


def statuses(answer: bytes) -> list[int]:
    """Returns the statuses of the answers on a connection, if there are any."""
    assert not answer or answer.startswith(b"HTTP/1.1 "), answer[:200]
    return [int(status) for status in STATUS_LINE.findall(answer)]


def check(port: int) -> None:
    @given(st.binary(max_size=300) | almost_requests())
    @settings(scaled(400), database=None, suppress_health_check=list(HealthCheck))
    def send(sent: bytes) -> None:
        for status in statuses(exchange(port, sent)):
            assert status < 500, sent

    send()


async def test_any_bytes_get_a_defined_answer(stack: Stack) -> None:
    """It is a status below 500 or a closed connection; afterwards the server lives, and nothing is left."""
    await asyncio.to_thread(check, stack.gateway.port)
    assert statuses(await asyncio.to_thread(exchange, stack.gateway.port, LIVE)) == [200]
    async with asyncio.timeout(10):
        while stack.gateway.app.state.context.metrics.num_in_flight or stack.gateway.client.num_pending:
            await asyncio.sleep(0.01)
