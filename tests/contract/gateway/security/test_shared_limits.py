"""Gateways that share a port share the limits of keys."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.gateway.fake_scheduler import FakeScheduler, serving
from tests.support.gateway.serving import CHAT, running_gateway, smollm2_folder

pytestmark = pytest.mark.contract


async def test_a_key_has_its_limit_once(tmp_path: Path) -> None:
    """A request at one gateway counts at the other, as long as it runs."""
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"name": "busy", "key": "sk-busy", "max_concurrent_requests": 1}]}))
    settings: dict[str, Any] = {"metrics_folder": tmp_path / "metrics", "api_key_file": path}
    scheduler = FakeScheduler(smollm2_folder(), [504, 2])
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
