"""Runs the plans of one Execute stream: each plan's step, and the further steps that it leases."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from protos.errors import Internal, InvalidArgument, TriptychError
from protos.logs import get_logger
from protos.step_messages import plan_from_proto, result_to_proto
from protos.steps import Decode, StepPlan, StepResult
from protos.triptych.v1 import worker_pb2
from protos.wire import MAX_MESSAGE_BYTES
from worker_svc.execution.worker import Worker


class PlanStream:
    """The plans of one stream. It reads ahead, so that a lease ends when another plan arrives."""

    def __init__(self, messages: AsyncIterator[worker_pb2.StepPlan]) -> None:
        """Starts reading."""
        self._messages = messages
        self._queue: asyncio.Queue[worker_pb2.StepPlan | None] = asyncio.Queue()
        self._latest = 0
        self._closed = False
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            async for message in self._messages:
                self._latest = max(self._latest, message.step)
                self._queue.put_nowait(message)
        finally:
            self._closed = True
            self._queue.put_nowait(None)

    async def next(self) -> worker_pb2.StepPlan | None:
        """Waits for the next plan. Returns `None` once the stream has ended."""
        return await self._queue.get()

    def is_superseded(self, step: int) -> bool:
        """Whether a plan after `step` has arrived, or the stream has ended. Safe on any thread."""
        return self._closed or self._latest > step

    def close(self) -> None:
        """Stops reading."""
        self._closed = True
        self._reading.cancel()


def run_plan(
    worker: Worker,
    message: worker_pb2.StepPlan,
    *,
    is_superseded: Callable[[], bool],
    emit: Callable[[worker_pb2.StepResult], None],
    on_progress: Callable[[], None],
) -> None:
    """Runs a plan's step, then leased steps until the lease or the plan ends. Runs on the model thread.

    A lease also ends after a step whose result is more than one token per slot: the scheduler must see it
    first. A step that fails ends the plan with an error result.

    Args:
        worker: a configured worker.
        message: the plan.
        is_superseded: whether the next plan is waiting, which ends a lease.
        emit: takes each step's result.
        on_progress: called between steps.
    """
    index, started = 0, time.perf_counter()
    try:
        plan = plan_from_proto(message)
        while True:
            outputs = worker.execute(plan)
            work = plan.work
            result = StepResult(plan.step, outputs=outputs, lease_index=index, execute_us=elapsed_us(started))
            reply = result_to_proto(plan, result)
            if reply.outputs:
                check_size(reply)
            following: StepPlan | None = None
            # Only the compact form has tokens at the top level: one per slot, and nothing else to tell.
            if (
                isinstance(work, Decode)
                and reply.token_ids
                and index + 1 < work.lease
                and not is_superseded()
            ):
                following = StepPlan(plan.step, work=work.next())
            reply.last = following is None
            emit(reply)
            if following is None:
                return
            on_progress()
            plan = following
            index, started = index + 1, time.perf_counter()
    except Exception as error:  # noqa: BLE001 - any exception fails this step only
        get_logger().exception("step_failed", step=message.step)
        failure = StepResult(
            message.step,
            error=as_triptych_error(error, "the step failed"),
            lease_index=index,
            execute_us=elapsed_us(started),
        )
        emit(result_to_proto(StepPlan(message.step), failure))


def check_size(reply: worker_pb2.StepResult) -> None:
    """Checks that a result can be sent; one that cannot would end the stream, and with it the worker.

    Raises:
        InvalidArgument: the step's requests ask for too much at once.
    """
    size = reply.ByteSize()
    if size > MAX_MESSAGE_BYTES:
        raise InvalidArgument(
            f"the step's results have {size >> 20} MiB and a message holds {MAX_MESSAGE_BYTES >> 20};"
            " ask for fewer log-probabilities"
        )


def as_triptych_error(error: Exception, context: str) -> TriptychError:
    """Returns a typed error as it is, and any other as Internal with `context` and its first line."""
    if isinstance(error, TriptychError):
        return error
    lines = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return Internal(f"{context}: {reason}")


def elapsed_us(started: float) -> int:
    """Returns the microseconds since `started`, a value of `time.perf_counter`."""
    return round((time.perf_counter() - started) * 1e6)
