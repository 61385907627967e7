"""The step loop of one worker: sends plans and delivers their results, over one Execute stream."""

import asyncio
from collections.abc import Callable
from typing import cast

import grpc.aio
from structlog.typing import FilteringBoundLogger

from protos.errors import Unavailable
from protos.step_messages import plan_to_proto, result_from_proto
from protos.steps import StepPlan, StepResult
from protos.triptych.v1 import worker_pb2, worker_pb2_grpc
from scheduler_svc.workers.engine_protocol import StepScheduler

_Call = grpc.aio.StreamStreamCall[worker_pb2.StepPlan, worker_pb2.StepResult]


class StepLoop:
    """Steps one worker, one plan after the other, and idles while there is no work."""

    def __init__(
        self,
        stub: "worker_pb2_grpc.WorkerAsyncStub",
        dispatch: Callable[[], None],
        *,
        step_timeout_s: float,
        log: FilteringBoundLogger,
    ) -> None:
        """Prepares to drive the worker behind `stub`.

        Args:
            stub: the worker.
            dispatch: gives waiting requests to replicas that have room.
            step_timeout_s: a worker that takes longer for one step counts as lost.
            log: names the worker.
        """
        self._stub = stub
        self._dispatch = dispatch
        self._step_timeout_s = step_timeout_s
        self._log = log
        self._work = asyncio.Event()
        # Ends a lease early; set while results are outstanding.
        self._interrupt: Callable[[], None] | None = None
        self._interrupting: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Signals new work: wakes an idle loop, and ends a running lease if the work cannot wait."""
        self._work.set()
        if self._interrupt is not None:
            self._interrupt()

    async def run(self, scheduler: StepScheduler) -> None:
        """Runs until the worker is lost.

        Raises:
            Unavailable: the worker ended the stream or did not answer in time.
            Internal: a result does not belong to its plan.
        """
        call = self._stub.Execute()
        # grpc.aio keeps a Future for every question about a call's status until the call ends. One callback
        # serves all idle periods.
        call.add_done_callback(lambda _: self._work.set())
        try:
            while True:
                await self._step(call, scheduler)
        finally:
            call.cancel()
            if self._interrupting is not None:
                self._interrupting.cancel()
                await asyncio.gather(self._interrupting, return_exceptions=True)

    async def _step(self, call: "_Call", scheduler: StepScheduler) -> None:
        """Runs one plan to its last result, or idles if there is nothing to do."""
        self._dispatch()
        plan = scheduler.step()
        if plan is None:
            self._work.clear()
            await self._idle(call)
            return
        await self._write(call, plan)
        self._interrupt = lambda: self._cut_short(call, scheduler)
        self._interrupt()  # work may have arrived while the plan was being written
        try:
            scheduler.update(await self._read(call, plan.step))
            while scheduler.has_pending:
                self._dispatch()
                self.wake()
                scheduler.update(await self._read(call, plan.step))
        finally:
            self._interrupt = None
        if self._interrupting is not None:
            written, self._interrupting = self._interrupting, None
            await written

    def _cut_short(self, call: "_Call", scheduler: StepScheduler) -> None:
        plan = scheduler.interrupt()
        if plan is not None:
            self._interrupting = asyncio.ensure_future(self._write(call, plan))

    async def _write(self, call: "_Call", plan: StepPlan) -> None:
        try:
            async with asyncio.timeout(self._step_timeout_s):
                await call.write(plan_to_proto(plan))
        except TimeoutError:
            raise self._hangs(plan.step) from None
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            pass  # the call has ended; reading from it gives the reason

    async def _read(self, call: "_Call", step: int) -> StepResult:
        """Returns the next result; `step` is the plan that started this run of results."""
        try:
            async with asyncio.timeout(self._step_timeout_s):
                answer = await call.read()
        except TimeoutError:
            raise self._hangs(step) from None
        if answer is grpc.aio.EOF:
            code, details = await call.code(), await call.details()
            raise Unavailable(f"the worker ended its stream: {details or code.name}")
        result = result_from_proto(cast("worker_pb2.StepResult", answer))
        if result.error is not None:
            self._log.error("step_failed", step=result.step, error=result.error.message)
        return result

    async def _idle(self, call: "_Call") -> None:
        """Waits for work, or for the worker to end the stream."""
        if not call.done():
            await self._work.wait()
        if call.done():
            raise Unavailable(
                f"the worker ended its stream: {await call.details() or (await call.code()).name}"
            )

    def _hangs(self, step: int) -> Unavailable:
        return Unavailable(
            f"step {step} was not answered within {self._step_timeout_s:g} s; the worker hangs"
        )
