"""A rolling restart of all services under load."""

import asyncio
import random
import signal
from pathlib import Path

import pytest

from protos.triptych.v1 import inference_pb2
from tests.support.campaign.campaign import loaded_stack
from tests.support.campaign.processes import tiny_chat_model
from tests.support.campaign.processes.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(1200)]

SEED = 5
WIDTH = 8


async def restart(stack: Stack, service: str) -> None:
    """Asks a process to end and waits until its successor serves."""
    pid = await stack.running(service)
    stack.signal(service, signal.SIGTERM)
    while await stack.running(service) == pid:
        await asyncio.sleep(0.05)
    await stack.serving()


async def lost_workers(stack: Stack) -> dict[str, float]:
    """Returns the scheduler's counts of lost workers by reason, and of suspects, without zeros."""
    text = (await stack.direct.GetMetrics(inference_pb2.GetMetricsRequest())).text.decode()
    samples = [line.split() for line in text.splitlines() if line.startswith("triptych:")]
    found = {
        name: float(value)
        for name, value in samples
        if name.startswith(("triptych:lost_workers_total", "triptych:suspect_requests_total"))
    }
    return {name: value for name, value in found.items() if value}


async def test_a_rolling_restart_under_load_loses_nothing(tmp_path: Path) -> None:
    """Each stream equals an undisturbed run, each process stops in order, and no request is suspected."""
    model = tiny_chat_model.write(tmp_path / "model")
    dice = random.Random(SEED)
    async with loaded_stack(model, tmp_path, dtype="float32", dice=dice) as (stack, load):
        async with load.clients(WIDTH, dice):
            # The workers one after the other within seconds: a request may meet every one of them.
            for worker in stack.workers * 2:
                await load.received(100)
                await restart(stack, worker)
            lost = await lost_workers(stack)
            for service in ("scheduler", "gateway"):
                await load.received(100)
                await restart(stack, service)
            await load.received(100)
        await stack.idle()
    assert load.failures == []
    assert load.answered > WIDTH
    assert lost == {'triptych:lost_workers_total{reason="left"}': 2.0 * len(stack.workers)}
    said = (tmp_path / "supervisor.log").read_text()
    assert said.count(" was stopped. ") == 2
    assert " died (" not in said
    for worker in stack.workers:
        assert (tmp_path / f"{worker}.log").read_text().count('"event": "stopped"') == 2
