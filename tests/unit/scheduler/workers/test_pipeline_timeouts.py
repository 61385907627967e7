"""Timeouts of steps on pipelines, in virtual time: an empty pipe is no hang, and a hang is found."""

import asyncio
import selectors
from collections.abc import Callable
from typing import Any, cast

import pytest

from protos.service.logs import get_logger
from protos.step_messages import plan_from_proto, result_to_proto
from protos.steps import Prefill, StepPlan, StepResult
from protos.triptych.v1 import worker_pb2
from scheduler_svc.workers.losses import FailedSteps
from scheduler_svc.workers.progress import ProgressWatch
from scheduler_svc.workers.step_loop import Hung, StepLoop
from scheduler_svc.workers.step_timeout import TIMES_USUAL
from tests.support.scheduler.factories import Rig, expected_tokens, make_rig, make_shapes, make_submission

LONGEST_S = 120.0
CHUNK_S, DECODE_S = 1.0, 0.4
"""Time of a step on each stage."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that does not wait: when nothing is left to do, its clock goes on to the next timer."""

    def __init__(self) -> None:
        selector = selectors.SelectSelector()
        super().__init__(selector)
        self._now = 0.0
        look = selector.select

        def select(timeout: float | None = None) -> list[Any]:
            assert timeout is not None, "nothing is ever going to happen"
            self._now += timeout
            return look(0)

        selector.select = select  # type: ignore[method-assign]

    def time(self) -> float:
        return self._now


class PipelinedCall:
    """An Execute stream: each plan takes its time on each stage, behind the plans before it."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._loop = asyncio.get_running_loop()
        self._free_at = [0.0] * rig.shapes.stages
        self._answers: asyncio.Queue[tuple[float, StepPlan, StepResult]] = asyncio.Queue()
        self._cancelled = self._loop.create_future()
        self.hangs = False
        """Whether plans are answered no more."""
        self.answered_s = 0.0
        """The time of the last answer."""

    async def write(self, message: worker_pb2.StepPlan) -> None:
        plan = plan_from_proto(message)
        takes = CHUNK_S if isinstance(plan.work, Prefill) else DECODE_S
        now = self._loop.time()
        for stage, free_at in enumerate(self._free_at):
            now = self._free_at[stage] = max(now, free_at) + takes
        self._answers.put_nowait((now, plan, self._rig.device.run(plan)))

    async def read(self) -> worker_pb2.StepResult:
        at, plan, result = await self._answers.get()
        left_s = 10 * LONGEST_S if self.hangs else at - self._loop.time()
        await asyncio.wait([self._cancelled], timeout=max(left_s, 0.0))
        if self._cancelled.done():
            raise asyncio.CancelledError
        self.answered_s = self._loop.time()
        return result_to_proto(plan, result)

    def cancel(self) -> None:
        if not self._cancelled.done():
            self._cancelled.set_result(None)

    def done(self) -> bool:
        return self._cancelled.done()

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        self._cancelled.add_done_callback(callback)


class Driven:
    """A step loop with a pipelined worker."""

    def __init__(self, stages: int) -> None:
        """Starts the loop."""
        shapes = make_shapes(
            max_model_len=512, max_num_seqs=2 * stages, block_size=8, buckets=(1, 2, 4, 8, 16), stages=stages
        )
        self.rig = make_rig(shapes, num_blocks=2000)
        self.call = PipelinedCall(self.rig)
        self._loop = StepLoop(
            cast("Any", None), self.rig.engine.dispatch, step_timeout_s=LONGEST_S, failed_steps=FailedSteps(3),
            progress=ProgressWatch(lambda _: None), log=get_logger(),
        )  # fmt: skip
        self.task = asyncio.create_task(self._loop.run(cast("Any", self.call), self.rig.scheduler))
        self._prompts: dict[str, list[int]] = {}

    def submit(self, count: int, prompt_len: int) -> None:
        """Adds requests of 30 tokens each."""
        for _ in range(count):
            name = f"r{len(self._prompts)}"
            self._prompts[name] = [3 + (len(self._prompts) * 7 + place) % 90 for place in range(prompt_len)]
            self.rig.submit(make_submission(self._prompts[name], request_id=name, max_tokens=30))
        self._loop.wake()

    async def settle(self) -> None:
        """Waits until all requests have ended, with the right tokens."""
        while self.rig.scheduler.is_busy or self.rig.engine.num_waiting:
            assert not self.task.done(), self.task.exception()
            await asyncio.sleep(1.0)
        for name, prompt in self._prompts.items():
            assert self.rig.sinks[name].tokens == expected_tokens(prompt, 30)


async def learn(driven: Driven) -> None:
    """Runs full and empty pipes in turn until the usual times are known."""
    for _ in range(3):
        driven.submit(4 * driven.rig.shapes.stages, 40)
        await driven.settle()
        driven.submit(1, 40)
        await driven.settle()


@pytest.mark.parametrize("stages", [2, 4])
def test_no_step_of_a_working_pipeline_is_overdue(stages: int) -> None:
    """A step alone takes as many times the usual time as there are stages, one behind chunks even more."""

    async def run() -> None:
        driven = Driven(stages)
        await learn(driven)
        driven.submit(1, 4)
        await driven.settle()
        driven.submit(2, 300)
        await asyncio.sleep(1.5 * CHUNK_S)
        driven.submit(3, 4)
        await driven.settle()
        driven.task.cancel()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())


@pytest.mark.parametrize("stages", [2, 4])
def test_a_hang_with_several_plans_in_flight_is_found(stages: int) -> None:
    """The scheduler waits for the slowest plan in flight, not for each of them, nor for the longest time."""

    async def run() -> None:
        driven = Driven(stages)
        await learn(driven)
        driven.submit(4 * stages, 40)
        await asyncio.sleep(stages * 10 * CHUNK_S)
        assert len(list(driven.rig.scheduler._plans)) > 1
        driven.call.hangs = True
        with pytest.raises(Hung, match="the worker hangs"):
            await driven.task
        waited_s = asyncio.get_running_loop().time() - driven.call.answered_s
        assert waited_s <= min(LONGEST_S - 1, TIMES_USUAL * CHUNK_S * 2)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())
