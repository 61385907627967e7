"""Gateways without a scheduler or a ready model, for which requests wait, and with a model that changes."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from protos.errors import Unavailable
from tests.support.gateway.fake_scheduler import FakeScheduler, serving
from tests.support.gateway.serving import CHAT, Gateway, running_gateway, smollm2_folder, stack_over
from tests.support.waiting import until

pytestmark = pytest.mark.contract


BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "x", "max_tokens": 3},
    "/v1/embeddings": {"input": ["x", "y"]},
}


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler(smollm2_folder(), [504, 505, 2])


@pytest.fixture
async def port(scheduler: FakeScheduler) -> int:
    """A port at which no scheduler listens yet."""
    async with serving(scheduler) as server:
        return server.port


@pytest.fixture
async def gateway(port: int) -> AsyncIterator[Gateway]:
    """A gateway without a scheduler, and with few places for requests."""
    async with running_gateway(port, wait=False, max_parked_requests=2, model_poll_s=0.2) as running:
        yield running


@pytest.fixture
async def http(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.base_url, timeout=30) as client:
        yield client


async def test_before_the_first_replica(scheduler: FakeScheduler) -> None:
    """A gateway that parks no request answers 503 with a reason until its model is ready, and serves then."""
    scheduler.ready = False
    async with (
        serving(scheduler) as server,
        running_gateway(server.port, wait=False, max_parked_requests=0) as gateway,
        httpx.AsyncClient(base_url=gateway.base_url) as http,
    ):
        for path in ("/health", "/v1/models"):
            response = await http.get(path)
            assert response.status_code == 503
            assert response.headers["retry-after"]
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 503
        scheduler.ready = True
        async with asyncio.timeout(10):
            while (await http.get("/health")).status_code != 200:
                await asyncio.sleep(0.02)
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_a_model_without_a_usable_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    async with (
        serving(FakeScheduler(tmp_path, [504])) as server,
        running_gateway(server.port, wait=False) as gateway,
        httpx.AsyncClient(base_url=gateway.base_url) as http,
    ):
        async with asyncio.timeout(10):
            while (response := await http.post("/v1/chat/completions", json=CHAT)).status_code == 503:
                await asyncio.sleep(0.02)
        assert response.status_code == 500
        assert "no tokenizer.json" in response.json()["error"]["message"]


async def test_a_new_tokenizer_is_loaded(scheduler: FakeScheduler, tmp_path: Path) -> None:
    async with stack_over(scheduler, model_poll_s=0.05) as stack, asyncio.timeout(10):
        scheduler.model = "other"
        while (await stack.http.get("/v1/models/other")).status_code != 200:
            await asyncio.sleep(0.02)
        assert scheduler.num_tokenizer_loads == 1
        for path in smollm2_folder().iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('changed') }}")
        scheduler.folder = tmp_path
        while (await stack.http.post("/v1/chat/completions", json=CHAT)).status_code != 400:
            await asyncio.sleep(0.02)
        assert scheduler.num_tokenizer_loads == 2


async def parked(gateway: Gateway, count: int) -> None:
    await until(lambda: len(gateway.client.startup_queue) == count)


async def lost(gateway: Gateway) -> None:
    """Waits until the gateway has noticed that its scheduler left."""
    await until(lambda: not gateway.client._outbox.is_open)


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_waits_for_the_first_scheduler(
    http: httpx.AsyncClient, gateway: Gateway, scheduler: FakeScheduler, port: int, path: str
) -> None:
    """It has one place, and runs when a scheduler has a ready worker; the gateway did not know its model."""
    scheduler.pooled_size = 4 if path == "/v1/embeddings" else 0
    scheduler.ready = False
    call = asyncio.create_task(http.post(path, json=BODIES[path]))
    await parked(gateway, 1)
    assert "triptych:gateway_parked_requests 1.0" in (await http.get("/metrics")).text
    async with serving(scheduler, port):
        assert (await http.get("/health")).status_code == 503
        assert not call.done()
        scheduler.ready = True
        assert (await call).status_code == 200
    await parked(gateway, 0)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_request_waits_for_a_scheduler_that_restarts(
    http: httpx.AsyncClient, gateway: Gateway, scheduler: FakeScheduler, port: int, streamed: bool
) -> None:
    """Requests that arrive while it is away, and while its successor has no worker, are answered."""
    body = {**CHAT, "stream": streamed}
    async with serving(scheduler, port):
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
    await lost(gateway)
    call = asyncio.create_task(http.post("/v1/chat/completions", json=body))
    await parked(gateway, 1)
    refusals = iter([Unavailable("no worker is ready yet", retry_after_ms=50)] * 2)
    scheduler.refuse = lambda _: next(refusals, None)
    async with serving(scheduler, port):
        response = await call
    assert response.status_code == 200
    assert response.text.rstrip().endswith("data: [DONE]") is streamed


@pytest.mark.parametrize("path", BODIES)
async def test_too_many_requests_are_refused(http: httpx.AsyncClient, gateway: Gateway, path: str) -> None:
    """Beyond the bound a request gets 503 at once, with Retry-After."""
    waiting = [asyncio.create_task(http.post(path, json=BODIES[path])) for _ in range(2)]
    await parked(gateway, 2)
    response = await http.post(path, json=BODIES[path])
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    for one in waiting:
        one.cancel()
    await parked(gateway, 0)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_disconnects_leaves_its_place(
    http: httpx.AsyncClient,
    gateway: Gateway,
    scheduler: FakeScheduler,
    port: int,
    *,
    streamed: bool,
    known: bool,
) -> None:
    """The place is free at once, whether the gateway knows its model yet or not; nothing is sent later."""
    if known:
        async with serving(scheduler, port):
            assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        await lost(gateway)
        scheduler.requests.clear()
    body = json.dumps({**CHAT, "stream": streamed})
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
    )
    await parked(gateway, 1)
    writer.close()
    await writer.wait_closed()
    await parked(gateway, 0)
    assert gateway.client.num_pending == 0
    async with serving(scheduler, port):
        assert (await http.post("/v1/completions", json=BODIES["/v1/completions"])).status_code == 200
        assert len(scheduler.requests) == 1


async def test_a_request_that_waits_in_vain(port: int) -> None:
    """After the time for parked requests it gets 503 with Retry-After."""
    async with (
        running_gateway(port, wait=False, park_timeout_s=0.2) as gateway,
        httpx.AsyncClient(base_url=gateway.base_url, timeout=20) as http,
    ):
        response = await http.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 503
        assert "within 0.2 s" in response.json()["error"]["message"]
        assert int(response.headers["retry-after"]) > 0
