"""Gateways that share a port: their metrics are summed, and a key has its limit once."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.gateway.fake_scheduler import FakeScheduler, serving
from tests.support.gateway.serving import CHAT, running_gateway, smollm2_folder

pytestmark = pytest.mark.contract


async def sample(url: str, name: str) -> list[float]:
    async with httpx.AsyncClient(timeout=20) as http:
        text = (await http.get(f"{url}/metrics")).text
    return [float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)]


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler(smollm2_folder(), [504, 2])


async def test_any_gateway_answers_for_all(scheduler: FakeScheduler, tmp_path: Path) -> None:
    """Each adds the others' counts to its own, lists the scheduler's once, and forgets one that has left."""
    async with serving(scheduler) as server:
        settings: dict[str, Any] = {"metrics_folder": tmp_path / "metrics"}
        async with running_gateway(server.port, **settings) as one, httpx.AsyncClient(timeout=20) as http:
            async with running_gateway(server.port, **settings) as two:
                for gateway in (one, two, two):
                    answer = await http.post(f"{gateway.base_url}/v1/chat/completions", json=CHAT)
                    assert answer.status_code == 200
                for gateway in (one, two):
                    assert sum(await sample(gateway.base_url, "vllm:request_success_total")) == 3
                    assert await sample(gateway.base_url, "triptych:gateway_processes") == [2]
                    assert len(await sample(gateway.base_url, "vllm:num_requests_running")) == 1
            (tmp_path / "metrics" / "dead.sock").touch()
            assert await sample(one.base_url, "triptych:gateway_processes") == [1]
            assert sum(await sample(one.base_url, "vllm:request_success_total")) == 1


async def test_metrics_that_are_cut_short_do_not_count(tmp_path: Path) -> None:
    """A gateway that dies while it writes spoils no scrape of the others."""

    async def die(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"# TYPE http_requests counter\nhttp_req")
        writer.close()

    folder = tmp_path / "metrics"
    async with running_gateway(9, wait=False, metrics_folder=folder) as gateway:
        other = await asyncio.start_unix_server(die, folder / "other.sock")
        async with other:
            assert await sample(gateway.base_url, "triptych:gateway_processes") == [1]


async def test_a_key_has_its_limit_once(scheduler: FakeScheduler, tmp_path: Path) -> None:
    """A request at one gateway counts at the other, as long as it runs."""
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"name": "busy", "key": "sk-busy", "max_concurrent_requests": 1}]}))
    settings: dict[str, Any] = {"metrics_folder": tmp_path / "metrics", "api_key_file": path}
    scheduler.pause_after = 1
    headers = {"authorization": "Bearer sk-busy"}
    async with (
        serving(scheduler) as server,
        running_gateway(server.port, **settings) as one,
        running_gateway(server.port, **settings) as two,
        httpx.AsyncClient(timeout=20, headers=headers) as http,
    ):
        urls = [f"{gateway.base_url}/v1/chat/completions" for gateway in (one, two)]
        running = asyncio.create_task(http.post(urls[0], json=CHAT))
        await scheduler.until(lambda: len(scheduler.requests) == 1)
        assert (await http.post(urls[1], json=CHAT)).status_code == 429
        await scheduler.resume()
        assert (await running).status_code == 200
        assert (await http.post(urls[1], json=CHAT)).status_code == 200
