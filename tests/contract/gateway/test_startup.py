"""Gateways before a model is ready, without a scheduler, and with a model that changes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.support.gateway.fake_scheduler import FakeScheduler, serving
from tests.support.gateway.serving import CHAT, Gateway, running_gateway, smollm2_folder

pytestmark = pytest.mark.contract


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler(smollm2_folder(), [504, 505, 2])


@pytest.fixture
async def gateway(scheduler: FakeScheduler) -> AsyncIterator[Gateway]:
    async with serving(scheduler) as server, running_gateway(server.port) as running:
        yield running


@pytest.fixture
async def http(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.base_url, timeout=20) as client:
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


async def test_a_model_without_a_usable_tokenizer(tmp_path: Any) -> None:
    """Requests are refused with what is wrong in the model's files."""
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


async def test_a_new_tokenizer_is_loaded(
    http: httpx.AsyncClient, gateway: Gateway, scheduler: FakeScheduler, tmp_path: Any
) -> None:
    """A tokenizer is fetched again only if the model's has changed."""
    assert scheduler.num_tokenizer_loads == 1
    scheduler.model = "other"
    gateway.app.state.context.watcher._wake.set()
    async with asyncio.timeout(10):
        while (await http.get("/v1/models/other")).status_code != 200:
            await asyncio.sleep(0.02)
    assert scheduler.num_tokenizer_loads == 1
    for path in smollm2_folder().iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('changed') }}")
    scheduler.folder = tmp_path
    gateway.app.state.context.watcher._wake.set()
    async with asyncio.timeout(10):
        while (await http.post("/v1/chat/completions", json=CHAT)).status_code != 400:
            await asyncio.sleep(0.02)
    assert scheduler.num_tokenizer_loads == 2
