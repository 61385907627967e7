"""A gateway that dies or freezes leaves nothing behind at its scheduler."""

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx
import pytest

from scheduler_svc.settings import Settings
from tests.support.gateway.serving import smollm2_folder
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.scheduler.running_scheduler import RunningScheduler, joined, run_scheduler
from tests.support.service import running_service
from tests.support.waiting import until

pytestmark = pytest.mark.contract

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 90,
    "ignore_eos": True,
    "stream": True,
}


class Stack(NamedTuple):
    worker: FakeWorker
    scheduler: RunningScheduler
    gateway: "subprocess.Popen[str]"
    url: str

    def num_free(self) -> list[int]:
        return [group.pool.num_free for kv in self.scheduler.engine.caches().values() for group in kv.groups]


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    files = {path.name: path.read_bytes() for path in smollm2_folder().iterdir()}
    worker = FakeWorker(files=files, vocab_size=49152, max_model_len=128)
    async with run_scheduler(Settings()) as scheduler, joined(scheduler, worker):
        address = f"127.0.0.1:{scheduler.server.port}"
        with running_service("-m", "gateway", "--port", "0", "--scheduler-address", address) as gateway:
            yield Stack(worker, scheduler, gateway.process, f"http://127.0.0.1:{gateway.line['port']}")


async def read(stack: Stack, lines: list[str]) -> None:
    async with (
        httpx.AsyncClient(base_url=stack.url, timeout=20) as http,
        http.stream("POST", "/v1/chat/completions", json=CHAT) as response,
    ):
        lines.extend([line async for line in response.aiter_lines()])


async def test_the_blocks_of_a_killed_gateway_return_within_a_second(stack: Stack) -> None:
    lines: list[str] = []
    await read(stack, lines)
    assert lines[-2] == "data: [DONE]"
    free = stack.num_free()
    stack.worker.hold_at_step = stack.worker.steps + 30
    reading = asyncio.create_task(read(stack, []))
    await until(lambda: not stack.worker.gate.is_set())
    stack.gateway.kill()
    with pytest.raises(httpx.HTTPError):
        await reading
    await until(lambda: not stack.scheduler.engine.num_running, timeout_s=1)
    assert stack.num_free() == free
    stack.worker.gate.set()


@pytest.mark.slow
async def test_a_frozen_gateway_keeps_nothing_beyond_the_keepalive(stack: Stack) -> None:
    """Its requests end without a reset: a ping is sent after 10 s and waits 5 s for its answer."""
    reading = asyncio.create_task(read(stack, []))
    await until(lambda: stack.scheduler.engine.num_running)
    stack.worker.gate.clear()
    stack.gateway.send_signal(signal.SIGSTOP)
    async with asyncio.timeout(20):
        while stack.scheduler.engine.num_running:
            # Slow steps, so that the answer lasts, but no hung one.
            stack.worker.gate.set()
            await asyncio.sleep(0)
            stack.worker.gate.clear()
            await asyncio.sleep(0.5)
    assert stack.scheduler.engine.num_waiting == 0
    stack.worker.gate.set()
    reading.cancel()
