"""The step loop of a worker: sends plans and delivers their results, over one Execute stream."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Protocol, cast

import grpc.aio
from structlog.typing import FilteringBoundLogger

from protos.errors import InvalidArgument, Unavailable
from protos.limits import LONG_PROMPT
from protos.step_messages import plan_to_proto, result_from_proto
from protos.steps import StepPlan, StepResult
from protos.triptych.v1 import worker_pb2, worker_pb2_grpc
from scheduler_svc.workers.losses import FailedSteps
from scheduler_svc.workers.progress import LONGEST_S, ProgressWatch, Stall
from scheduler_svc.workers.step_timeout import Deadline, StepTimeouts, UsualTime

_Call = grpc.aio.StreamStreamCall[worker_pb2.StepPlan, worker_pb2.StepResult]


class StepScheduler(Protocol):
    """The scheduler of a replica, as seen by its step loop."""

    @property
    def num_running(self) -> int:
        """Requests with a slot."""

    @property
    def is_busy(self) -> bool:
        """Whether requests run here, or wait for a running request."""

    def next_plan(self) -> StepPlan | None:
        """Returns the next plan for the worker; None if it has enough, or without work."""

    def drain(self) -> None:
        """Makes no plan until all are answered, so that the next follows from results alone."""

    def update(self, result: StepResult) -> None:
        """Delivers the result of a plan."""


class StreamLost(Unavailable):
    """The stream ended, not because of this scheduler."""

    def __init__(self, message: str, *, by_transport: bool) -> None:
        """Makes an error; ``by_transport`` tells a broken connection from an end by the worker."""
        super().__init__(message)
        self.by_transport = by_transport


class Hung(Unavailable):
    """A step was not answered in time."""


class Left(Unavailable):
    """The worker announced its departure and answered its last plan."""


# The first plan of a stream changes nothing. The scheduler's own plans begin at 1.
_GREETING = StepPlan(0)


class StepLoop:
    """Steps a worker, with as many plans in flight as its scheduler makes, and idles without work."""

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
        """Prepares to step a worker, lost if a step takes longer than `step_timeout_s`.

        `dispatch` places waiting requests on replicas with room.
        """
        self._stub = stub
        self._dispatch = dispatch
        self._step_timeout_s = step_timeout_s
        self._failed_steps = failed_steps
        self._progress = progress
        self._log = log
        self._timeouts: StepTimeouts
        self._deadline: Deadline
        # The plans without their last result, each with the usual time of its steps.
        self._sent: deque[tuple[StepPlan, UsualTime]] = deque()
        # The reason for cancelling the call: an overdue step, or a failure to plan.
        self._failure: Exception | None = None
        self._work = asyncio.Event()
        # Sends all plans due; set while results are outstanding.
        self._send_more: Callable[[], None] | None = None
        # The write of the latest plan.
        self._writing: asyncio.Future[None] | None = None
        self._leaving = False

    def leave(self) -> None:
        """Ends :meth:`run` after the worker's last answer."""
        self._leaving = True
        self._work.set()

    def wake(self) -> None:
        """Signals new work: wakes an idle loop, or sends more plans while others are in flight."""
        if self._send_more is not None and not self._work.is_set():
            asyncio.get_running_loop().call_soon(self._send_more)
        self._work.set()

    @asynccontextmanager
    async def stream(self) -> AsyncIterator["_Call"]:
        """Opens the Execute stream for the block, which begins with the worker's first answer.

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

        A step that makes its graph may take `first_step_timeout_s`; 0 if no step does.

        Raises:
            StreamLost: the worker ended the stream.
            Hung: the worker did not answer in time.
            FailedTooOften: the worker failed too many steps.
            Stalled: its steps computed nothing while requests ran.
            Left: after :meth:`leave`.
            Internal: a result does not belong to its plan.
        """
        # grpc.aio keeps a Future for every question about a call's status until the call ends. A single
        # callback serves all idle periods.
        call.add_done_callback(lambda _: self._work.set())
        self._timeouts = StepTimeouts(self._step_timeout_s, first_step_timeout_s)
        self._deadline = Deadline(lambda: self._give_up(call))

        def send_more() -> None:
            if self._send_more is None:
                return
            try:
                self._send_all(call, scheduler)
            except Exception as error:  # noqa: BLE001 - it ends this loop, as it would without a wake
                self._fail(call, error)

        try:
            while not (self._leaving and not self._sent):
                self._send_all(call, scheduler)
                if not self._sent:
                    await self._idle(call, scheduler)
                    continue
                self._send_more = send_more
                try:
                    await self._deliver(call, scheduler)
                finally:
                    self._send_more = None
            raise Left("the worker leaves")
        except (asyncio.CancelledError, StreamLost):
            # A cancelled call raises the same as a cancelled task, or has ended.
            if self._failure is None:
                raise
            raise self._failure from None
        finally:
            self._deadline.close()
            call.cancel()
            if self._writing is not None:
                self._writing.cancel()
                await asyncio.gather(self._writing, return_exceptions=True)

    def _send_all(self, call: "_Call", scheduler: StepScheduler) -> None:
        """Places waiting requests on replicas, and sends all plans due."""
        self._work.set()  # a wake meanwhile changes nothing
        self._dispatch()
        while not (self._leaving or call.done()) and (plan := scheduler.next_plan()) is not None:
            usual = self._timeouts.of(plan)
            if self._sent:
                self._deadline.extend(usual.timeout_s)
            else:
                self._deadline.set(usual.timeout_s)
            self._sent.append((plan, usual))
            self._writing = asyncio.ensure_future(self._write_after(self._writing, call, plan))
        self._work.clear()

    async def _write_after(self, earlier: asyncio.Future[None] | None, call: "_Call", plan: StepPlan) -> None:
        if earlier is not None:
            await earlier  # a call takes one write at a time
        try:
            await self._write(call, plan)
        except Exception as error:  # noqa: BLE001 - nobody awaits the last write
            self._fail(call, error)

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
        _, usual = self._sent[0]
        # A worker may launch the next plan before it answers this one. The time runs from the previous
        # answer: from then on, this plan waits for no other, also on a pipeline.
        self._deadline.set(max(other.timeout_s for _, other in self._sent))
        answer = await call.read()
        seconds = self._deadline.answered()
        if answer is grpc.aio.EOF:
            raise await _end_of(call)
        result = result_from_proto(cast("worker_pb2.StepResult", answer))
        if result.num_steps:
            # A result may have lain here for a while, so the time of the worker also counts.
            usual.observe(max(seconds, result.execute_us * 1e-6) / result.num_steps)
        if result.last or result.error is not None:
            self._sent.popleft()
        if result.error is not None:
            self._log.error("step_failed", step=result.step, error=result.error.message)
        if result.error is not None or result.num_steps:
            self._progress.computed()
        else:
            # Before the update: the requests of a lost replica's unanswered plans are suspects.
            self._note_idle(scheduler, Stall.EMPTY)
        scheduler.update(result)
        if result.error is None:
            if result.num_steps:
                self._failed_steps.succeeded()
        elif not isinstance(result.error, InvalidArgument):
            self._failed_steps.failed(result.error.message)

    def _note_idle(self, scheduler: StepScheduler, stall: Stall) -> bool:
        """Notes that nothing was computed; after a stall, starts over and returns True."""
        if not scheduler.is_busy:
            self._progress.computed()
            return False
        stalled = self._progress.idled(stall, in_flight=len(self._sent))
        if stalled:
            self._log.error("no_progress", reason=stall.value, running=scheduler.num_running)
            scheduler.drain()
        return stalled

    async def _idle(self, call: "_Call", scheduler: StepScheduler) -> None:
        """Waits for work, or for the end of the stream."""
        if self._note_idle(scheduler, Stall.UNPLANNED) or self._leaving:
            return
        if not call.done():
            with suppress(TimeoutError):
                async with asyncio.timeout(LONGEST_S if scheduler.is_busy else None):
                    await self._work.wait()
        if call.done():
            raise await _end_of(call)

    def _fail(self, call: "_Call", error: Exception) -> None:
        """Ends the call, and :meth:`run` with its first error."""
        self._failure = self._failure or error
        call.cancel()

    def _give_up(self, call: "_Call") -> None:
        """Ends the call of a hung worker."""
        plan, _ = self._sent[0]
        self._failure = Hung(
            f"step {plan.step} was not answered within {self._deadline.timeout_s:g} s; the worker hangs"
        )
        call.cancel()


async def _end_of(call: "_Call") -> StreamLost:
    code = await call.code()
    return StreamLost(
        f"the worker ended its stream: {await call.details() or code.name}",
        by_transport=code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED),
    )
