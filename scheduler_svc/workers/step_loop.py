"""The step loop of one worker: sends plans and delivers their results, over one Execute stream."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import cast

import grpc.aio
from structlog.typing import FilteringBoundLogger

from protos.errors import InvalidArgument, TriptychError, Unavailable
from protos.limits import LONG_PROMPT
from protos.step_messages import plan_to_proto, result_from_proto
from protos.steps import Prefill, StepPlan
from protos.triptych.v1 import worker_pb2, worker_pb2_grpc
from scheduler_svc.workers.engine_protocol import StepScheduler
from scheduler_svc.workers.losses import FailedSteps
from scheduler_svc.workers.progress import LONGEST_S, ProgressWatch, Stall
from scheduler_svc.workers.step_budget import Deadline, StepBudgets, UsualTime

_Call = grpc.aio.StreamStreamCall[worker_pb2.StepPlan, worker_pb2.StepResult]


class StreamLost(Unavailable):
    """The stream ended, and not because of this scheduler."""

    def __init__(self, message: str, *, by_transport: bool) -> None:
        """Makes an error; ``by_transport`` says whether the connection broke, or else the worker ended it."""
        super().__init__(message)
        self.by_transport = by_transport


class Hung(Unavailable):
    """A step was not answered in time."""


class Left(Unavailable):
    """The worker said that it leaves, and has answered its last plan."""


# The first plan of a stream, which changes nothing. The scheduler's own plans begin at 1.
_GREETING = StepPlan(0)


class StepLoop:
    """Steps one worker, with as many plans in flight as its scheduler sends, and idles without work."""

    def __init__(
        self,
        stub: "worker_pb2_grpc.WorkerAsyncStub",
        dispatch: Callable[[], None],
        *,
        step_timeout_s: float,
        failed_steps: FailedSteps,
        progress: ProgressWatch,
        log: FilteringBoundLogger,
    ) -> None:
        """Prepares to drive the worker behind `stub`.

        Args:
            stub: the worker.
            dispatch: gives waiting requests to replicas that have room.
            step_timeout_s: a worker that takes longer for one step counts as lost.
            failed_steps: counts the worker's failed steps.
            progress: notices steps that compute nothing.
            log: names the worker.
        """
        self._stub = stub
        self._dispatch = dispatch
        self._step_timeout_s = step_timeout_s
        self._failed_steps = failed_steps
        self._progress = progress
        self._log = log
        self._budgets: StepBudgets
        self._deadline: Deadline
        # The plans without their last result, each with the usual time of its steps.
        self._sent: deque[tuple[StepPlan, UsualTime]] = deque()
        # Plans with a chunk behind one of the same prompt that failed: they fail for the same reason.
        self._behind_failed: set[int] = set()
        # Set when a step is overdue, just before the call is cancelled.
        self._overdue: Hung | None = None
        self._work = asyncio.Event()
        # Sends plans behind the one in flight; set while results are outstanding.
        self._interrupt: Callable[[], None] | None = None
        # The last write of a plan that another one was in flight before.
        self._writing: asyncio.Future[None] | None = None
        self._leaving = False

    def leave(self) -> None:
        """Ends :meth:`run` once the worker has answered the plans that it has."""
        self._leaving = True
        self._work.set()

    def wake(self) -> None:
        """Signals new work: wakes an idle loop, or sends what can be sent behind the plan in flight."""
        self._work.set()
        if self._interrupt is not None:
            self._interrupt()

    @asynccontextmanager
    async def stream(self) -> AsyncIterator["_Call"]:
        """Opens the Execute stream for the block, which begins once the worker has answered on it.

        Raises:
            Unavailable: the worker refused the stream, or did not answer.
        """
        call = self._stub.Execute()
        try:
            try:
                async with asyncio.timeout(self._step_timeout_s):
                    await self._write(call, _GREETING)
                    answer = await call.read()
            except TimeoutError:
                raise Unavailable(
                    f"the worker did not accept the Execute stream within {self._step_timeout_s:g} s"
                ) from None
            if answer is grpc.aio.EOF:
                raise await _end_of(call)
            if (error := result_from_proto(cast("worker_pb2.StepResult", answer)).error) is not None:
                raise error
            yield call
        finally:
            call.cancel()

    async def run(
        self, call: "_Call", scheduler: StepScheduler, *, first_step_timeout_s: float = 0.0
    ) -> None:
        """Runs on an accepted stream until the worker is lost.

        Args:
            call: the stream.
            scheduler: plans the steps.
            first_step_timeout_s: the time for a step that makes its graph, if steps do.

        Raises:
            StreamLost: the worker ended the stream.
            Hung: the worker did not answer in time.
            FailedTooOften: the worker failed too many steps.
            Stalled: its steps computed nothing while requests ran.
            Left: after :meth:`leave`.
            Internal: a result does not belong to its plan.
        """
        # grpc.aio keeps a Future for every question about a call's status until the call ends. One callback
        # serves all idle periods.
        call.add_done_callback(lambda _: self._work.set())
        self._budgets = StepBudgets(self._step_timeout_s, first_step_timeout_s)
        self._deadline = Deadline(lambda: self._give_up(call))
        try:
            while not self._leaving:
                await self._step(call, scheduler)
            raise Left("the worker leaves")
        except asyncio.CancelledError:
            # A cancelled call raises the same as a cancelled task.
            if self._overdue is None:
                raise
            raise self._overdue from None
        finally:
            self._deadline.close()
            call.cancel()
            if self._writing is not None:
                self._writing.cancel()
                await asyncio.gather(self._writing, return_exceptions=True)

    async def _step(self, call: "_Call", scheduler: StepScheduler) -> None:
        """Runs one plan to its last result, or idles if there is nothing to do."""
        self._dispatch()
        plan = scheduler.step()
        if plan is None:
            self._work.clear()
            await self._idle(call, scheduler)
            return
        usual = self._budgets.of(plan)
        self._sent.append((plan, usual))
        self._deadline.set(usual.budget_s)
        await self._write(call, plan)
        self._interrupt = lambda: self._send_more(call, scheduler)
        self._interrupt()  # work may have arrived while the plan was being written
        try:
            await self._deliver(call, scheduler)
            while scheduler.has_pending:
                self._dispatch()
                self._work.set()
                self._send_more(call, scheduler, may_preempt=True)
                await self._deliver(call, scheduler)
        finally:
            self._interrupt = None
        if self._writing is not None:
            written, self._writing = self._writing, None
            await written

    def _send_more(self, call: "_Call", scheduler: StepScheduler, *, may_preempt: bool = False) -> None:
        """Sends the plans that the worker should have by now, behind those in flight."""
        if (plan := scheduler.interrupt()) is not None:
            self._send_behind(call, plan)
        while not self._leaving and (plan := scheduler.plan_ahead(may_preempt=may_preempt)) is not None:
            self._send_behind(call, plan)

    def _send_behind(self, call: "_Call", plan: StepPlan) -> None:
        """Sends a plan while another is in flight."""
        self._sent.append((plan, self._budgets.of(plan)))
        self._writing = asyncio.ensure_future(self._write_behind(self._writing, call, plan))

    async def _write_behind(
        self, earlier: asyncio.Future[None] | None, call: "_Call", plan: StepPlan
    ) -> None:
        if earlier is not None:
            await earlier  # a call takes one write at a time
        await self._write(call, plan)

    async def _write(self, call: "_Call", plan: StepPlan) -> None:
        if any(len(new.token_ids) > LONG_PROMPT for new in plan.admit):
            message = await asyncio.to_thread(plan_to_proto, plan)
        else:
            message = plan_to_proto(plan)
        # A write fails if the call has ended; reading from it gives the reason.
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await call.write(message)

    async def _deliver(self, call: "_Call", scheduler: StepScheduler) -> None:
        """Waits for the next result and delivers it."""
        plan, usual = self._sent[0]
        # A worker may launch the plan behind before it answers this one. The time runs from the answer to the
        # plan before: from then on, this one waits for no other, also on a pipeline.
        self._deadline.set(max(other.budget_s for _, other in self._sent))
        answer = await call.read()
        seconds = self._deadline.answered()
        if answer is grpc.aio.EOF:
            raise await _end_of(call)
        result = result_from_proto(cast("worker_pb2.StepResult", answer))
        if not result.void:
            # A result may have lain here for a while, so the time of the worker counts, too.
            usual.observe(max(seconds, result.execute_us * 1e-6))
        if result.last:
            self._sent.popleft()
        if result.error is not None:
            self._log.error("step_failed", step=result.step, error=result.error.message)
        if result.error is not None or (plan.work is not None and not result.void):
            self._progress.computed()
        else:
            # Before the update: the requests of a lost replica's unanswered plans are suspects.
            self._note_idle(scheduler, Stall.VOID if result.void else Stall.EMPTY)
        scheduler.update(result)
        if result.error is not None:
            self._count_failure(plan, result.error)
        elif plan.work is not None and not result.void:
            self._failed_steps.succeeded()

    def _count_failure(self, plan: StepPlan, error: TriptychError) -> None:
        """Counts a failed step against the worker, unless a request or an earlier failure explains it."""
        explained = plan.step in self._behind_failed
        later = {other.step: other.work for other, _ in self._sent if other.step > plan.step}
        self._behind_failed.intersection_update(later)
        if isinstance(plan.work, Prefill):
            slot = plan.work.slot
            self._behind_failed.update(
                step for step, work in later.items() if isinstance(work, Prefill) and work.slot == slot
            )
        if not explained and not isinstance(error, InvalidArgument):
            self._failed_steps.failed(error.message)

    def _note_idle(self, scheduler: StepScheduler, stall: Stall) -> bool:
        """Notes that nothing was computed; starts over if that is a stall, and returns whether it is."""
        if not scheduler.is_busy:
            self._progress.computed()
            return False
        stalled = self._progress.idled(stall, in_flight=len(self._sent))
        if stalled:
            self._log.error("no_progress", reason=stall.value, running=scheduler.num_running)
            scheduler.plan_afresh()
        return stalled

    async def _idle(self, call: "_Call", scheduler: StepScheduler) -> None:
        """Waits for work, or for the worker to end the stream."""
        if self._note_idle(scheduler, Stall.UNPLANNED):
            return
        if not call.done():
            with suppress(TimeoutError):
                async with asyncio.timeout(LONGEST_S if scheduler.is_busy else None):
                    await self._work.wait()
        if call.done():
            raise await _end_of(call)

    def _give_up(self, call: "_Call") -> None:
        """Ends the call of a worker that hangs."""
        plan, _ = self._sent[0]
        self._overdue = Hung(
            f"step {plan.step} was not answered within {self._deadline.budget_s:g} s; the worker hangs"
        )
        call.cancel()


async def _end_of(call: "_Call") -> StreamLost:
    code = await call.code()
    return StreamLost(
        f"the worker ended its stream: {await call.details() or code.name}",
        by_transport=code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED),
    )
