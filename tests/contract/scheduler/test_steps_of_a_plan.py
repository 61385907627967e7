"""Plans of several steps over real gRPC: the step loop while a worker runs them."""

import asyncio

import pytest

from protos.steps import Decode, Prefill, StepPlan
from tests.support.scheduler.factories import expected_tokens
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.scheduler.running_scheduler import (
    generate_request,
    joined,
    run_scheduler,
    tokens_of,
)

pytestmark = pytest.mark.contract

# With one prompt token, the first decode plan lasts until the request ends.
SHORT = [5]


def worker_with(**more: int) -> FakeWorker:
    return FakeWorker(default_block_size=8, **more)  # type: ignore[arg-type]


async def next_plan(worker: FakeWorker) -> StepPlan:
    async with asyncio.timeout(5):
        return await worker.plans.get()


async def decoding(worker: FakeWorker) -> None:
    """Waits for a plan of several decode steps."""
    while not isinstance(work := (await next_plan(worker)).work, Decode) or work.steps == 1:
        pass


async def test_the_steps_of_a_plan_reach_the_client_one_by_one() -> None:
    """The client has the tokens of earlier steps while later ones still run."""
    worker = worker_with(hold_at_step=5)
    async with run_scheduler() as scheduler, joined(scheduler, worker):
        tokens: list[int] = []
        async for event in scheduler.inference.Generate(generate_request(SHORT, max_tokens=20)):
            tokens += event.token_ids
            if len(tokens) == 4:
                worker.gate.set()
    assert tokens == expected_tokens(SHORT, 20)
    assert worker.device is not None
    assert worker.device.passes == 20


async def test_a_new_request_ends_the_steps_that_run() -> None:
    """It does so after the current one; the plan that ends them has its chunk."""
    worker = worker_with(hold_at_step=4)
    async with run_scheduler() as scheduler, joined(scheduler, worker):
        first = asyncio.create_task(tokens_of(scheduler, generate_request(SHORT, max_tokens=20)))
        await decoding(worker)
        second = asyncio.create_task(tokens_of(scheduler, generate_request([6, 7], max_tokens=4)))
        while not isinstance((plan := await next_plan(worker)).work, Prefill):
            pass
        worker.gate.set()
        assert plan.interrupts
        assert [new.token_ids for new in plan.admit] == [(6, 7)]
        assert isinstance((await next_plan(worker)).work, Decode)
        assert await first == expected_tokens(SHORT, 20)
        assert await second == expected_tokens([6, 7], 4)
