"""Clients that leave, read nothing, or send far too much: defined answers, and nothing is left of them."""

import asyncio
import contextlib
import gc
import json
import os
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import httpx
import psutil
import pytest

from tests.support.gateway.serving import TEXT, Stack, running_stack

pytestmark = pytest.mark.contract

# The fake scheduler and the HTTP client have a task or a file more at times.
FEW: Final = 4

BODY: Final = {"prompt": "x", "max_tokens": 400, "stream": True}


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(TEXT) as stack:
        yield stack


def request_of(path: str, body: bytes, *headers: str, length: bool = True) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", *headers]
    if length:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


async def exchange(port: int, sent: bytes) -> tuple[int, bytes]:
    """Sends a request; returns the status and the rest of the answer, once the server has closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(sent)
            await writer.drain()
        async with asyncio.timeout(20):
            head, _, rest = (await reader.read()).partition(b"\r\n")
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return int(head.split()[1]), rest


class Baseline:
    """What the process holds before and after a test."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        gc.collect()
        self.now = self._counts()
        self.memory = psutil.Process().memory_info().rss

    def _counts(self) -> tuple[int, int, int, int]:
        context = self._stack.gateway.app.state.context
        num_files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names are all that is needed
        in_flight = context.metrics.num_in_flight
        return len(asyncio.all_tasks()), self._stack.gateway.client.num_pending, in_flight, num_files

    def _is_back(self) -> bool:
        return all(now <= before + FEW for now, before in zip(self._counts(), self.now, strict=True))

    async def returns(self, more_memory: int = 1 << 30) -> None:
        """Waits until all counts are back; checks that memory grew by at most ``more_memory`` bytes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10):
                while not self._is_back():
                    await asyncio.sleep(0.01)
        assert self._is_back(), (self.now, self._counts())
        gc.collect()
        assert psutil.Process().memory_info().rss - self.memory <= more_memory


async def leave(port: int, *, reads: bool) -> None:
    """Asks for a stream and breaks the connection off, after the first token or before it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_of("/v1/completions", json.dumps(BODY).encode()))
    if reads:
        await reader.readuntil(b"data: ")
    else:
        await writer.drain()
    writer.transport.abort()


@pytest.mark.parametrize(
    "count", [60, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(240)])]
)
async def test_a_storm_of_clients_that_leave(stack: Stack, count: int) -> None:
    """Every request that reached the scheduler is aborted there, and the next client is served."""
    stack.scheduler.eos, stack.scheduler.step_s = -1, 0.01
    await leave(stack.gateway.port, reads=True)
    await stack.scheduler.until(lambda: len(stack.scheduler.aborted) == 1)
    before = Baseline(stack)
    async with asyncio.timeout(200):
        await asyncio.gather(*(leave(stack.gateway.port, reads=index % 4 > 0) for index in range(count)))
    await before.returns(more_memory=64 << 20)
    scheduler = stack.scheduler
    await scheduler.until(lambda: len(set(scheduler.aborted)) == len(scheduler.requests))
    scheduler.eos, scheduler.step_s = 2, 0
    assert TEXT in (await stack.http.post("/v1/completions", json={"prompt": "x"})).text


@pytest.mark.parametrize("chunked", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_bodies_beyond_the_limit(stack: Stack, chunked: bool) -> None:
    """10 MB get 413 with an error of the API, also for a client that looks only when all is sent."""
    before = Baseline(stack)
    text = json.dumps({"prompt": "x" * 10_000_000}).encode()
    if chunked:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(text), text)
        sent = request_of("/v1/completions", body, "transfer-encoding: chunked", length=False)
    else:
        sent = request_of("/v1/completions", text)
    status, answer = await exchange(stack.gateway.port, sent)
    assert status == 413
    assert b"payload_too_large" in answer
    await before.returns()


async def while_others_ask(stack: Stack, path: str, body: dict[str, Any]) -> tuple[httpx.Response, float]:
    """Posts a request; returns its answer, and how long another client waited meanwhile at most."""
    slow, longest = asyncio.create_task(stack.http.post(path, json=body, timeout=100)), 0.0
    began = time.monotonic()
    while not slow.done():
        await asyncio.sleep(0.02)
        await stack.http.get("/live")
        began, previous = time.monotonic(), began
        longest = max(longest, began - previous)
    return slow.result(), longest


@pytest.mark.slow
async def test_long_texts_below_the_limit(stack: Stack) -> None:
    """They are read beside the other requests, and refused because of the context."""
    text = "a b " * 750_000
    messages = {"messages": [{"role": "user", "content": text}]}
    for path, body in (("/v1/completions", {"prompt": text}), ("/v1/chat/completions", messages)):
        began = time.monotonic()
        response, longest = await while_others_ask(stack, path, body)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert longest < 0.2 + (time.monotonic() - began) / 3


async def test_invalid_utf8(stack: Stack) -> None:
    """Every route that takes JSON answers 400 in its protocol's form."""
    bodies = [b'{"prompt": "\xff\xfe"}', b"\xff", b'{"\xc3\x28": 1}', b'{"prompt": "\xed\xa0\x80"}']
    document = stack.gateway.app.openapi()
    paths = [path for path, one in document["paths"].items() if "requestBody" in one.get("post", {})]
    assert len(paths) > 12
    for path in paths:
        if "lora" in path:
            continue  # needs admin rights first
        for body in bodies:
            response = await stack.http.post(path, content=body)
            assert response.status_code == 400, path
            assert response.json()["error"]["message"]


async def test_floods_of_headers(stack: Stack) -> None:
    """64 KiB of headers are the limit, whatever their number; below it they are taken."""
    before = Baseline(stack)
    body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
    for headers, expected in (
        ([f"x-{index}: y" for index in range(4000)], 200),
        ([f"x-{index}: y" for index in range(200_000)], 431),
        (["x: " + "y" * 10_000_000], 431),
        (["y" * 10_000_000 + ": x"], 431),
        (["x: " + "y" * 63_000], 200),
        (["x: " + "y" * 65_600], 431),
        (["x: " + "y" * 70_000], 431),
        ([f"x-{index}: {'y' * 1000}" for index in range(70)], 431),
        ([f"x-{index}: {'y' * 1000}" for index in range(120)], 431),
    ):
        sent = request_of("/v1/completions", body, "connection: close", *headers)
        try:
            status, _ = await exchange(stack.gateway.port, sent)
        except (ConnectionError, IndexError):
            status = 431  # cut off while it still sent
        assert status == expected
    await before.returns()


async def test_long_targets(stack: Stack) -> None:
    """Beyond 64 KiB, a request's target is refused as such."""
    for target, expected in (
        ("/live?" + "a" * 66_000, 414),
        ("/" + "a" * 66_000, 414),
        ("/" + "a" * 60_000, 404),
    ):
        status, _ = await exchange(stack.gateway.port, request_of(target, b"", "connection: close"))
        assert status == expected


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        ("32", 200), ("0032", 200), ("0" * 5000 + "32", 400), ("1" * 5000, 400), ("9" * 20, 400), ("+32", 400),
        ("-32", 400), ("3_2", 400), ("32, 32", 400), ("32\r\ncontent-length: 32", 400), ("٣٢", 400), ("0x20", 400),
        ("32.0", 400), ("3 2", 400), ("", 400),
    ],
)  # fmt: skip
async def test_lengths_that_are_none(stack: Stack, length: str, expected: int) -> None:
    """A length is a few digits; anything else is malformed and never fails in the gateway."""
    body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
    assert len(body) == 32
    headers = (f"content-length: {length}", "connection: close")
    status, _ = await exchange(
        stack.gateway.port, request_of("/v1/completions", body, *headers, length=False)
    )
    assert status == expected


def long_chat(turns: int) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[index % 2], "content": f"turn {index}"} for index in range(turns)]}


async def test_chats_of_4000_messages(stack: Stack) -> None:
    """One that fits the context is answered, one that does not is refused; other clients go on meanwhile."""
    chat = long_chat(3999)
    for path, more in (("/v1/chat/completions", {}), ("/v1/messages", {"max_tokens": 5, "model": "smollm2"})):
        response, longest = await while_others_ask(stack, path, {**chat, **more})
        assert response.status_code == 400
        assert "maximum context length is 512 tokens" in response.text
        assert longest < 5
    stack.scheduler.max_model_len = 10**6
    watcher = stack.gateway.app.state.context.watcher
    watcher._wake.set()
    while watcher.max_model_len != 10**6:
        await asyncio.sleep(0.01)
    response = await stack.http.post("/v1/chat/completions", json={**chat, "max_tokens": 5})
    assert response.status_code == 200
    assert len(stack.scheduler.requests[-1].prompt_token_ids) > 20_000
