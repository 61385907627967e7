"""Runs the plans of one Execute stream: each plan's step, and the further steps that it leases."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from protos.errors import Internal, InvalidArgument, NotFinite, TriptychError
from protos.service.grpc_options import MAX_MESSAGE_BYTES
from protos.service.logs import get_logger
from protos.step_messages import result_to_proto
from protos.steps import Decode, SlotOutput, StepPlan, StepResult, slots_of
from worker_svc.pending_step import PendingStep


class Launcher(Protocol):
    """What runs the steps: a configured `execution.worker.Worker`."""

    def launch(self, plan: StepPlan, *, leased: bool = False) -> PendingStep:
        """Applies a plan and hands its step to the device."""
        ...


class Arrivals(Protocol):
    """What has arrived on the stream. Safe on any thread."""

    def is_superseded(self, step: int) -> bool:
        """Whether a plan has arrived that ends the lease of plan `step`, or the stream has ended."""
        ...


class Thread(Protocol):
    """The thread that runs the plans: `api.model_thread.ModelThread`."""

    def progressed(self) -> None:
        """Reports progress."""

    def defer(self, function: Callable[[], object]) -> None:
        """Queues a function on the thread that waits for the device."""

    def settle(self) -> None:
        """Waits until everything that was deferred has run."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A launched step, or why it could not be launched."""

    plan: StepPlan
    index: int
    launched: PendingStep | Exception
    since: float
    goes_on: bool
    """Whether another step of the plan follows, unless the scheduler must see this one's result first."""


class PlanRunner:
    """Runs plans one after the other on the model thread, and hands over each step's result.

    A lease ends early when a plan arrives that does not continue it, when a step fails, and after a result
    that the scheduler must see first: a slot got several tokens or an error, or was refused. A plan that
    continues another runs only if all steps of the other ran and no slot moved by more than one position. A
    failed slot stays where plans expect it and a refused one is skipped, so neither makes the next plan void.

    Where nothing of a step depends on the host, another thread waits for its tokens and hands them over. The
    model thread launches the next step meanwhile, so that the device always has work. It launches one step of
    a lease ahead, no more: a plan that ends the lease would have to wait for the rest.
    """

    def __init__(
        self,
        worker: Launcher,
        arrivals: Arrivals,
        thread: Thread,
        *,
        hand_over: Callable[[StepPlan, StepResult], None],
    ) -> None:
        """Runs the plans of one stream; `hand_over` takes each result with its plan, on either thread."""
        self._worker = worker
        self._arrivals = arrivals
        self._thread = thread
        self._hand_over = hand_over
        # The number of the last plan whose steps were all launched.
        self._whole = -1
        # The number of the last plan after which the next one cannot continue: a step failed or was void, a
        # slot moved by more than one position, or the lease ended early. Results are answered in order, so
        # only one thread writes at a time.
        self._broken = -1
        # When the last result was read.
        self._read_s = 0.0

    def run(self, plan: StepPlan) -> None:
        """Runs a plan's step, then leased steps until the lease or the plan ends."""
        if plan.continues and (self._whole != plan.step - 1 or self._broken == plan.step - 1):
            self._pass_over(plan)
            return
        lease = plan.work.lease if isinstance(plan.work, Decode) else 1
        step = plan
        for index in range(lease):
            since = time.perf_counter()
            launched = self._launch(step, leased=index > 0)
            deferred = isinstance(launched, PendingStep) and launched.runs_ahead
            last = index + 1 == lease
            if not last or not deferred:
                self._thread.settle()
            goes_on = (
                not last and not self._is_void(plan, index) and not self._arrivals.is_superseded(plan.step)
            )
            current = _Step(plan, index, launched, since, goes_on)
            if deferred:
                self._thread.defer(partial(self._answer, current))
            else:
                self._answer(current)
            if last:
                self._whole = plan.step
            if not goes_on or self._broken == plan.step:
                return
            self._thread.progressed()
            assert isinstance(step.work, Decode)
            step = StepPlan(plan.step, work=step.work.next())

    def _launch(self, step: StepPlan, *, leased: bool) -> PendingStep | Exception:
        try:
            return self._worker.launch(step, leased=leased)
        except Exception as error:  # noqa: BLE001 - any exception fails this step only
            return error

    def _is_void(self, plan: StepPlan, index: int) -> bool:
        """Whether a step computes on what an earlier one should have left, and that one did not."""
        if index == 0:
            return plan.continues and self._broken == plan.step - 1
        return self._broken == plan.step

    def _pass_over(self, plan: StepPlan) -> None:
        """Applies a plan whose work is void: its requests keep the blocks that it gives them."""
        since = time.perf_counter()
        applied = self._launch(replace(plan, work=None), leased=False)
        self._thread.settle()
        self._broken = plan.step
        if isinstance(applied, Exception):
            self._answer_failure(_Step(plan, 0, applied, since, goes_on=False), applied)
        else:
            self._hand_over(plan, StepResult(plan.step, (), applied.outputs, void=True))

    def _answer(self, step: _Step) -> None:
        """Waits for a step's result and hands it over. All results before it have been handed over."""
        plan, launched = step.plan, step.launched
        # A plan that could not be applied fails all the same: its admissions may be lost.
        if self._is_void(plan, step.index) and (step.index or isinstance(launched, PendingStep)):
            self._broken = plan.step
            if isinstance(launched, PendingStep):
                # Ranks report their results in order: one that is not read would be taken for the next one's.
                launched.discard(plan.work)
            if step.index == 0:
                assert isinstance(launched, PendingStep)
                self._hand_over(plan, StepResult(plan.step, (), _refusals(plan, launched), void=True))
            return
        try:
            if isinstance(launched, Exception):
                raise launched
            tokens, outputs = launched.read(plan.work)
            if outputs and not tokens:
                _check_size(plan, StepResult(plan.step, outputs=outputs))
        except BaseException as error:  # noqa: BLE001 - anything raised, SystemExit too, fails this step only
            self._broken = plan.step
            self._answer_failure(step, error)
            return
        goes_on = step.goes_on and (bool(tokens) or _one_token_for_each(plan, outputs))
        if goes_on != step.goes_on or any(len(output.token_ids) > 1 for output in outputs):
            self._broken = plan.step
        result = StepResult(
            plan.step, tokens, outputs, last=not goes_on,
            lease_index=step.index, execute_us=elapsed_us(max(step.since, self._read_s)),
        )  # fmt: skip
        self._read_s = time.perf_counter()
        self._hand_over(plan, result)

    def _answer_failure(self, step: _Step, error: BaseException) -> None:
        get_logger().error("step_failed", step=step.plan.step, exc_info=error)
        failure = as_triptych_error(error, "the step failed")
        result = StepResult(
            step.plan.step, error=failure, lease_index=step.index, execute_us=elapsed_us(step.since)
        )
        self._hand_over(step.plan, result)


def _refusals(plan: StepPlan, launched: PendingStep) -> Sequence[SlotOutput]:
    """Returns the outputs of a step that say which of the plan's admissions were refused."""
    admitted = {admission.slot for admission in plan.admit}
    return [output for output in launched.outputs if output.error is not None and output.slot in admitted]


def _one_token_for_each(plan: StepPlan, outputs: Sequence[SlotOutput]) -> bool:
    """Whether each slot of the plan's work got one token, whatever comes with it.

    One whose logits are not finite computes on: the next step may have been launched already.
    """
    return len(outputs) == len(slots_of(plan.work)) and all(
        isinstance(output.error, NotFinite) or (len(output.token_ids) == 1 and output.error is None)
        for output in outputs
    )


def _check_size(plan: StepPlan, result: StepResult) -> None:
    """Raises InvalidArgument for a result too large to send, which would end the stream."""
    size = result_to_proto(plan, result).ByteSize()
    if size > MAX_MESSAGE_BYTES:
        raise InvalidArgument(
            f"the step's results have {size >> 20} MiB and a message holds {MAX_MESSAGE_BYTES >> 20};"
            " ask for fewer log-probabilities"
        )


def as_triptych_error(error: BaseException, context: str) -> TriptychError:
    """Returns a typed error as it is, and any other as Internal with `context` and its first line."""
    if isinstance(error, TriptychError):
        return error
    lines = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return Internal(f"{context}: {reason}")


def elapsed_us(started: float) -> int:
    """Returns the microseconds since `started`, a value of `time.perf_counter`."""
    return round((time.perf_counter() - started) * 1e6)
