"""One Execute stream: its plans go to the model thread as they arrive, and their results come back."""

import asyncio
from collections.abc import AsyncIterator

from protos.step_messages import plan_from_proto, result_to_proto
from protos.steps import StepPlan, StepResult
from protos.triptych.v1 import worker_pb2
from worker_svc.api.leases import Launcher, PlanRunner
from worker_svc.api.model_thread import ModelThread
from worker_svc.api.watchdog import STEP, FailedSteps


class PlanStream:
    """Reads plans ahead, so that the model thread goes from one to the next without the event loop."""

    def __init__(
        self,
        messages: AsyncIterator[worker_pb2.StepPlan],
        worker: Launcher,
        thread: ModelThread,
        *,
        failed_steps: FailedSteps,
        step_limit_s: float,
    ) -> None:
        """Starts reading.

        Args:
            messages: the stream's plans.
            worker: runs them, on `thread`.
            thread: the model thread.
            failed_steps: counts the steps' results.
            step_limit_s: how long a step may take before the process counts as hung; 0 for any time.
        """
        self._messages = messages
        self._thread = thread
        self._failed_steps = failed_steps
        self._step_limit_s = step_limit_s
        self._loop = asyncio.get_running_loop()
        self._results: asyncio.Queue[worker_pb2.StepResult | None] = asyncio.Queue()
        self._unanswered = 0
        # The latest plan that does not continue another, and the latest that does.
        self._latest = -1
        self._continuing = -1
        self._ended = self._closed = False
        self._runner = PlanRunner(worker, self, hand_over=self._hand_over, on_progress=thread.progressed)
        self._reading = asyncio.ensure_future(self._read())

    async def results(self) -> AsyncIterator[worker_pb2.StepResult]:
        """Yields the results in order, until the stream has ended and all its plans are answered."""
        while self._unanswered or not self._ended:
            if (result := await self._results.get()) is not None:
                self._unanswered -= result.last
                yield result

    def close(self) -> None:
        """Ends the stream: the running step is the last one."""
        self._ended = self._closed = True
        self._reading.cancel()

    def is_superseded(self, step: int) -> bool:
        """Whether a plan has arrived that ends the lease of plan `step`, or the stream has ended."""
        return self._ended or self._latest > step

    def has_next(self, step: int) -> bool:
        """Whether the plan after `step` has arrived, and is going to run."""
        return not self._ended and max(self._latest, self._continuing) > step

    async def _read(self) -> None:
        try:
            async for message in self._messages:
                self._take(message)
        finally:
            self._ended = True
            self._results.put_nowait(None)

    def _take(self, message: worker_pb2.StepPlan) -> None:
        """Queues a plan on the model thread."""
        plan = plan_from_proto(message)
        self._unanswered += 1
        self._thread.submit(lambda: self._run(plan), what=STEP, limit_s=self._step_limit_s)
        # Only now: a plan that others wait for must come.
        if plan.continues:
            self._continuing = plan.step
        else:
            self._latest = plan.step

    def _run(self, plan: StepPlan) -> None:
        """Runs a plan, unless nothing reads its results any more. Runs on the model thread."""
        if not self._closed:
            self._runner.run(plan)

    def _hand_over(self, plan: StepPlan, result: StepResult) -> None:
        """Passes a result to the event loop, which encodes it. Runs on the model thread."""
        self._loop.call_soon_threadsafe(self._deliver, plan, result)

    def _deliver(self, plan: StepPlan, result: StepResult) -> None:
        # Counted first, so that the count is up to date when the scheduler reads the result.
        self._failed_steps.note(plan, result)
        self._results.put_nowait(result_to_proto(plan, result))
