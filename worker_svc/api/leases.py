"""Runs the plans of one Execute stream: each plan's step, and the further steps that it leases."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from protos.errors import Internal, InvalidArgument, TriptychError
from protos.logs import get_logger
from protos.step_messages import one_token_each, result_to_proto
from protos.steps import Decode, StepPlan, StepResult
from protos.wire import MAX_MESSAGE_BYTES
from worker_svc.launched_step import LaunchedStep


class Launcher(Protocol):
    """What runs the steps: a configured `execution.worker.Worker`."""

    def launch(self, plan: StepPlan, *, leased: bool = False) -> LaunchedStep:
        """Applies a plan and hands its step to the device."""
        ...


class Arrivals(Protocol):
    """What has arrived on the stream. Safe on any thread."""

    def is_superseded(self, step: int) -> bool:
        """Whether a plan has arrived that ends the lease of plan `step`, or the stream has ended."""
        ...

    def has_next(self, step: int) -> bool:
        """Whether the plan after `step` has arrived, and is going to run."""
        ...


@dataclass(slots=True)
class _Step:
    """A launched step."""

    plan: StepPlan
    index: int
    launched: LaunchedStep
    since: float
    goes_on: bool
    """Whether another step of the plan follows, if this one gives one token for each slot."""


class PlanRunner:
    """Runs plans one after the other on the model thread, and hands over each step's result.

    A lease ends early after a step whose result is more than one token per slot, because the scheduler must
    see it first; when a plan arrives that does not continue it; and when a step fails. A plan that continues
    another runs only if the other ran whole.

    Where nothing of a step depends on the host, the next one is launched before its tokens are read, so that
    a device that runs ahead has work while the host reads and reports them.
    """

    def __init__(
        self,
        worker: Launcher,
        arrivals: Arrivals,
        *,
        hand_over: Callable[[StepPlan, StepResult], None],
        on_progress: Callable[[], None],
    ) -> None:
        """Runs the plans of one stream.

        Args:
            worker: runs the steps.
            arrivals: the plans that have arrived.
            hand_over: takes each result with its plan.
            on_progress: called between the steps of a lease.
        """
        self._worker = worker
        self._arrivals = arrivals
        self._hand_over = hand_over
        self._on_progress = on_progress
        # The number of the last plan that ran whole; its last step may still be unread.
        self._whole = -1
        self._unread: _Step | None = None
        # When the last result was read.
        self._read_s = 0.0

    def run(self, plan: StepPlan) -> None:
        """Runs a plan's step, then leased steps until the lease or the plan ends."""
        if plan.continues and self._whole != plan.step - 1:
            self._pass_over(plan)
            return
        lease = plan.work.lease if isinstance(plan.work, Decode) else 1
        step = plan
        for index in range(lease):
            started = time.perf_counter()
            launched = self._launch(step, leased=index > 0)
            if not self._answer_unread() and (index > 0 or plan.continues):
                # That step failed, and this one computed on what it left.
                if index == 0:
                    self._hand_over(plan, StepResult(plan.step, void=True))
                return
            if isinstance(launched, Exception):
                self._answer_failure(plan, index, started, launched)
                return
            goes_on = index + 1 < lease and not self._arrivals.is_superseded(plan.step)
            current = _Step(plan, index, launched, started, goes_on)
            if launched.runs_ahead and (goes_on or self._arrivals.has_next(plan.step)):
                self._unread = current
            elif not self._answer(current):
                return
            if not goes_on:
                if index + 1 == lease:
                    self._whole = plan.step
                return
            self._on_progress()
            assert isinstance(step.work, Decode)
            step = StepPlan(plan.step, work=step.work.next())

    def _launch(self, step: StepPlan, *, leased: bool) -> LaunchedStep | Exception:
        try:
            return self._worker.launch(step, leased=leased)
        except Exception as error:  # noqa: BLE001 - any exception fails this step only
            return error

    def _pass_over(self, plan: StepPlan) -> None:
        """Applies a plan whose work is void: its requests keep the blocks that it gives them."""
        self._answer_unread()
        started = time.perf_counter()
        applied = self._launch(replace(plan, work=None), leased=False)
        if isinstance(applied, Exception):
            self._answer_failure(plan, 0, started, applied)
        else:
            self._hand_over(plan, StepResult(plan.step, (), applied.outputs, void=True))

    def _answer_unread(self) -> bool:
        """Answers the step before the one just launched; returns whether it went well."""
        unread, self._unread = self._unread, None
        return unread is None or self._answer(unread)

    def _answer(self, step: _Step) -> bool:
        """Reads a step's result and hands it over.

        Returns:
            Whether it is one token for each slot or nothing.
        """
        plan, outputs = step.plan, step.launched.outputs
        try:
            read = step.launched.read_tokens
            tokens = one_token_each(plan.work, outputs) if read is None else read()
            if outputs and not tokens:
                _check_size(plan, StepResult(plan.step, outputs=outputs))
        except Exception as error:  # noqa: BLE001 - any exception fails this step only
            self._answer_failure(plan, step.index, step.since, error)
            return False
        plain = bool(tokens) or not outputs
        result = StepResult(
            plan.step, tokens, () if tokens else outputs, last=not (step.goes_on and plain),
            lease_index=step.index, execute_us=elapsed_us(max(step.since, self._read_s)),
        )  # fmt: skip
        self._read_s = time.perf_counter()
        self._hand_over(plan, result)
        return plain

    def _answer_failure(self, plan: StepPlan, index: int, since: float, error: Exception) -> None:
        self._whole = -1
        get_logger().error("step_failed", step=plan.step, exc_info=error)
        failure = as_triptych_error(error, "the step failed")
        self._hand_over(
            plan, StepResult(plan.step, error=failure, lease_index=index, execute_us=elapsed_us(since))
        )


def _check_size(plan: StepPlan, result: StepResult) -> None:
    """Checks that a result can be sent; one that cannot would end the stream, and with it the worker.

    Raises:
        InvalidArgument: the step's requests ask for too much at once.
    """
    size = result_to_proto(plan, result).ByteSize()
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
