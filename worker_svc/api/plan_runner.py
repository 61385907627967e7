"""Runs the plans of one Execute stream: each plan's work, step by step."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from protos.errors import Internal, InvalidArgument, TriptychError
from protos.service.grpc_options import MAX_MESSAGE_BYTES
from protos.service.logs import get_logger
from protos.step_messages import result_to_proto
from protos.steps import Decode, SlotOutput, StepPlan, StepResult, slots_of, without_slots
from worker_svc.pending_step import PendingStep, as_outputs


class Thread(Protocol):
    """The thread of the plans: `api.model_thread.ModelThread`."""

    def progressed(self) -> None:
        """Reports progress."""

    def defer(self, function: Callable[[], object]) -> None:
        """Queues a function on the thread that waits for the device."""

    def settle(self) -> None:
        """Waits for all deferred functions."""


@dataclass(slots=True)
class _Tenancy:
    """The state of a slot from an admission to its release."""

    is_dead: bool = False


@dataclass(slots=True)
class _Run:
    """A running plan."""

    plan: StepPlan
    tenancies: dict[int, _Tenancy]
    """Of the slots admitted, grown or run by the plan."""
    held: StepResult | None = None
    """The result of its last steps, until it covers as many as the plan asks for."""
    ended: bool = False
    """Whether the last result was handed over."""

    def dead(self) -> set[int]:
        return {slot for slot, tenancy in self.tenancies.items() if tenancy.is_dead}


@dataclass(frozen=True, slots=True)
class _Step:
    """A launched step, or why it could not be launched."""

    run: _Run
    launched: PendingStep | Exception
    since: float
    is_last: bool
    """Whether the plan allows no further step."""

    @property
    def runs_ahead(self) -> bool:
        """Whether the model thread may go on before the step is read."""
        launched = self.launched
        if isinstance(launched, Exception) or not launched.runs_ahead:
            return False
        # Only a step read as tokens is certain to leave its rows ready for another.
        return self.is_last or launched.read_tokens is not None


class PlanRunner:
    """Applies a plan to its live slots, and runs its work step by step.

    A slot is dead from a refused admission, a failed step or an error of its own until its release.
    Work ends after its last step, after a step with several tokens or an error for a slot, and with the
    arrival of an interrupting plan.

    If no part of a step depends on the host, another thread waits for its tokens and hands them over.
    Meanwhile the model thread launches the next step, so the device always has work. It launches only one
    step of a plan ahead: an interrupting plan would wait for the rest. A step may fail after the launch of
    later steps with its slots; their results for dead slots are dropped.
    """

    def __init__(
        self,
        launch: Callable[[StepPlan], PendingStep],
        is_interrupted: Callable[[int], bool],
        thread: Thread,
        *,
        hand_over: Callable[[StepPlan, StepResult], None],
    ) -> None:
        """Runs the plans of a stream.

        Args:
            launch: applies a plan and hands the first step of its work to the device.
            is_interrupted: whether a plan with a later number interrupts, or the stream has ended. Safe on
                any thread, like `hand_over`.
            thread: the thread of `run`.
            hand_over: takes each result with its plan.
        """
        self._launch_plan = launch
        self._is_interrupted = is_interrupted
        self._thread = thread
        self._hand_over = hand_over
        self._tenancies: dict[int, _Tenancy] = {}
        # When the last result was read.
        self._read_s = 0.0

    def run(self, plan: StepPlan) -> None:
        """Applies a plan and runs its work."""
        run = self._open(plan)
        part = self._live_part(run)
        steps = part.work.steps if isinstance(part.work, Decode) else 1
        for index in range(steps):
            step = self._launch(run, part, is_last=index + 1 == steps)
            if not (step.is_last and step.runs_ahead):
                self._thread.settle()
            if step.runs_ahead:
                # Decided now: the next step is launched before this one's result is handed over.
                goes_on = self._goes_on(step)
                self._thread.defer(partial(self._answer, step, goes_on=goes_on))
            else:
                self._answer(step)
                goes_on = not run.ended
            if not goes_on:
                return
            self._thread.progressed()
            assert isinstance(step.launched, PendingStep)
            work = without_slots(step.launched.work, run.dead())
            if not isinstance(work, Decode):
                return  # all of its slots died, and the result before was marked as the last
            part = StepPlan(plan.step, replace(work, steps=1))

    def _open(self, plan: StepPlan) -> _Run:
        for slot in plan.release:
            self._tenancies.pop(slot, None)
        for admission in plan.admit:
            self._tenancies[admission.slot] = _Tenancy()
        changed = [*(one.slot for one in plan.admit), *(one.slot for one in plan.grow)]
        named = {*slots_of(plan.work), *changed}
        return _Run(plan, {slot: self._tenancies.setdefault(slot, _Tenancy()) for slot in named})

    def _live_part(self, run: _Run) -> StepPlan:
        """Returns a plan without dead slots."""
        plan, dead = run.plan, run.dead()
        return replace(
            plan, work=without_slots(plan.work, dead), grow=[one for one in plan.grow if one.slot not in dead]
        )

    def _launch(self, run: _Run, part: StepPlan, *, is_last: bool) -> _Step:
        since = time.perf_counter()
        launched: PendingStep | Exception
        try:
            launched = self._launch_plan(part)
        except Exception as error:  # noqa: BLE001 - any exception fails this step only
            launched = error
        else:
            for output in launched.refused:
                run.tenancies[output.slot].is_dead = True
        return _Step(run, launched, since, is_last)

    def _goes_on(self, step: _Step) -> bool:
        return not step.is_last and not self._is_interrupted(step.run.plan.step)

    def _answer(self, step: _Step, *, goes_on: bool | None = None) -> None:
        """Waits for a step's result and hands it over, after all earlier results.

        Without `goes_on`, the step itself decides whether another follows it.
        """
        run, launched = step.run, step.launched
        try:
            if isinstance(launched, Exception):
                raise launched
            tokens, outputs = launched.read()
            _check_size(run.plan, outputs)
        except BaseException as error:  # noqa: BLE001 - anything raised, SystemExit too, fails this step only
            self._answer_failure(step, error)
            return
        if run.ended:
            return  # all slots died in the step before
        if goes_on is None:
            goes_on = self._goes_on(step)
        execute_us = elapsed_us(max(step.since, self._read_s))
        self._read_s = time.perf_counter()
        dead = run.dead()
        live = slots_of(without_slots(launched.work, dead))
        if tokens and len(live) == len(slots_of(run.plan.work)) and not launched.refused:
            self._give(run, StepResult(run.plan.step, tokens, last=not goes_on, execute_us=execute_us))
            return
        outputs = [one for one in outputs or as_outputs(launched.work, tokens) if one.slot not in dead]
        for output in outputs:
            if output.error is not None:
                run.tenancies[output.slot].is_dead = True
        alive = not run.dead().issuperset(live)
        # Running ahead goes on while a slot lives: the next step may have been launched already.
        one_each = all(len(one.token_ids) == 1 for one in outputs) and len(outputs) == len(live)
        self._give(run, StepResult(
            run.plan.step, outputs=[*launched.refused, *outputs],
            last=not (goes_on and alive and (one_each or step.runs_ahead)),
            num_steps=int(len(live) > 0), execute_us=execute_us,
        ))  # fmt: skip

    def _give(self, run: _Run, result: StepResult) -> None:
        """Hands over a step's result, or holds it to add the tokens of further steps."""
        held, run.held = run.held, None
        if held is not None and result.token_ids:
            result = replace(
                result, token_ids=[*held.token_ids, *result.token_ids], num_steps=held.num_steps + 1,
                execute_us=held.execute_us + result.execute_us,
            )  # fmt: skip
        elif held is not None:
            self._hand_over(run.plan, held)
        most = run.plan.work.steps_per_result if isinstance(run.plan.work, Decode) else 1
        if result.token_ids and not result.last and result.num_steps < most:
            run.held = result
            return
        run.ended = result.last
        self._hand_over(run.plan, result)

    def _answer_failure(self, step: _Step, error: BaseException) -> None:
        """Answers a failed step, whose slots die. If they are dead already, its error is no news."""
        run, plan = step.run, step.run.plan
        if run.ended:
            return
        if run.tenancies and len(run.dead()) == len(run.tenancies):
            refused = step.launched.refused if isinstance(step.launched, PendingStep) else ()
            self._give(run, StepResult(plan.step, outputs=refused, num_steps=0))
            return
        for tenancy in run.tenancies.values():
            tenancy.is_dead = True
        get_logger().error("step_failed", step=plan.step, exc_info=error)
        failure = as_triptych_error(error, "the step failed")
        num_steps, execute_us = int(plan.work is not None), elapsed_us(step.since)
        self._give(run, StepResult(plan.step, error=failure, num_steps=num_steps, execute_us=execute_us))


def _check_size(plan: StepPlan, outputs: Sequence[SlotOutput]) -> None:
    """Raises InvalidArgument for a result too large to send: gRPC would end the stream."""
    size = result_to_proto(plan, StepResult(plan.step, outputs=outputs)).ByteSize() if outputs else 0
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
