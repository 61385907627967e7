"""The step loop of a worker of two pipeline stages, over real gRPC: several plans are in flight."""

import asyncio
from dataclasses import replace

import pytest

from protos.steps import Decode, StepPlan
from protos.triptych.v1 import registry_pb2
from scheduler_svc.settings import Settings
from scheduler_svc.shapes.shape_config import ShapeConfig
from scheduler_svc.workers import replicas
from scheduler_svc.workers.descriptions import WorkerDescription
from scheduler_svc.workers.step_loop import StepLoop
from tests.support.scheduler.factories import expected_tokens
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.scheduler.running_scheduler import (
    RunningScheduler,
    generate_request,
    joined,
    register,
    run_scheduler,
    run_worker,
    tokens_of,
)

pytestmark = [pytest.mark.contract, pytest.mark.timeout(30)]

PROMPTS = [[5, 6, 7], [8, 9], [10], [11, 12, 13]]


@pytest.fixture(autouse=True)
def _two_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every worker count as two stages."""
    shapes_for = replicas.shapes_for

    def of_two_stages(settings: Settings, description: WorkerDescription) -> ShapeConfig:
        return shapes_for(settings, replace(description, pipeline_stages=2))

    monkeypatch.setattr(replicas, "shapes_for", of_two_stages)


async def answers(scheduler: RunningScheduler) -> list[list[int]]:
    requests = [generate_request(prompt, max_tokens=20) for prompt in PROMPTS]
    return await asyncio.gather(*[tokens_of(scheduler, request) for request in requests])


async def in_flight(worker: FakeWorker, step: int) -> list[StepPlan]:
    """Returns the plans that have arrived while the worker holds a step: that step's and those behind it."""
    plans: list[StepPlan] = []
    while not plans or plans[-1].step < step + 2:
        plans.append(await worker.plans.get())
    return plans[-3:]


async def test_the_other_batch_is_sent_before_a_step_is_answered() -> None:
    """The worker holds a decode step and has the next two: one of other slots, and one of the same."""
    worker = FakeWorker(hold_at_step=20)
    async with run_scheduler(Settings(lease_steps=1)) as scheduler, joined(scheduler, worker):
        asking = asyncio.create_task(answers(scheduler))
        held, behind, next_but_one = await in_flight(worker, 20)
        assert isinstance(held.work, Decode)
        assert isinstance(behind.work, Decode)
        assert sorted([*held.work.slots, *behind.work.slots]) == [0, 1, 2, 3]
        assert next_but_one.work == held.work
        worker.gate.set()
        assert await asking == [expected_tokens(prompt, 20) for prompt in PROMPTS]
    assert worker.configured is not None
    assert list(worker.configured.decode_buckets) == [1, 2]


async def test_a_worker_that_leaves_answers_all_plans_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan follows, so none of its requests is a suspect."""
    worker = FakeWorker(hold_at_step=20)
    async with (
        run_scheduler(Settings(max_worker_losses=1, lease_steps=1)) as scheduler,
        run_worker(worker) as port,
        run_worker(FakeWorker()) as other,
    ):
        await register(scheduler, port, "w0")
        asking = asyncio.create_task(answers(scheduler))
        await in_flight(worker, 20)
        # The step loop knows that the worker leaves before the held step is answered.
        leave = StepLoop.leave

        def leave_and_go_on(loop: StepLoop) -> None:
            leave(loop)
            worker.gate.set()

        monkeypatch.setattr(StepLoop, "leave", leave_and_go_on)
        await scheduler.registry.Leave(registry_pb2.LeaveRequest(worker_id="w0"))
        assert worker.steps == 22, "the held step and those behind it"
        await register(scheduler, other, "w1")
        assert await asking == [expected_tokens(prompt, 20) for prompt in PROMPTS]
