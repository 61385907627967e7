"""The virtual worker. No other module of the simulation knows what a scheduler sends to its worker."""

from collections import deque
from collections.abc import Callable
from functools import cache

from protos.steps import Decode, Prefill, StepPlan, StepResult
from scheduler_svc.simulation.step_times import StepTimes
from scheduler_svc.workers.engine_protocol import StepScheduler


class VirtualWorker:
    """Runs what one replica's scheduler sends, in order, as a worker and its step loop do without any delay.

    A step lasts as long as the model of step times says. Its result reaches the scheduler the moment it ends,
    with the same token for every row.
    """

    def __init__(self, times: StepTimes, clock: Callable[[], float], dispatch: Callable[[], None]) -> None:
        """Starts idle; set :attr:`scheduler` before anything else.

        Args:
            times: how long steps take.
            clock: virtual seconds.
            dispatch: gives waiting requests to replicas that have room.
        """
        self.scheduler: StepScheduler
        self.ends_s: float | None = None
        """When the current step ends; None while idle."""
        self.busy_s = 0.0
        """Seconds spent in steps."""
        self.computed = 0
        """Tokens that steps computed, without padding."""
        self.padded = 0
        """Tokens of padding."""
        self._clock = clock
        self._dispatch = dispatch
        self._chunk_s = cache(times.chunk)
        self._decode_s = cache(times.decode)
        # Plans without their last result; the first one runs.
        self._plans: deque[StepPlan] = deque()
        self._index = 0
        self._spent_s = 0.0
        # The number of the last plan that ran whole.
        self._whole = 0

    def wake(self) -> None:
        """Sends what can be sent behind the step that runs; an idle worker needs :meth:`start`."""
        if self.ends_s is not None:
            self._send_more(may_preempt=False)

    def start(self) -> None:
        """Starts work if there is any and the worker is idle."""
        if self.ends_s is None:
            self._next()

    def finish(self) -> None:
        """Ends the current step, at its time, and starts the next one."""
        plan, index = self._plans[0], self._index
        self.ends_s = None
        lease = plan.work.lease if isinstance(plan.work, Decode) else 1
        last = index + 1 == lease or any(not newer.continues for newer in list(self._plans)[1:])
        tokens: tuple[int, ...] = ()
        if isinstance(plan.work, Decode):
            tokens = (7,) * len(plan.work.slots)
        elif isinstance(plan.work, Prefill) and plan.work.sample:
            tokens = (7,)
        if last:
            self._plans.popleft()
            self._index = 0
            self._whole = plan.step if index + 1 == lease else self._whole
        else:
            self._index += 1
        self.scheduler.update(
            StepResult(plan.step, tokens, last=last, lease_index=index, execute_us=int(self._spent_s * 1e6))
        )
        self._next()

    def _next(self) -> None:
        """Fetches plans and starts the next step, if there is one."""
        while True:
            self._dispatch()
            if not self._plans:
                if self.scheduler.has_pending or (plan := self.scheduler.step()) is None:
                    return
                self._plans.append(plan)
            self._send_more(may_preempt=True)
            plan = self._plans[0]
            void = plan.continues and self._index == 0 and self._whole != plan.step - 1
            if plan.work is not None and not void:
                break
            self._plans.popleft()
            if not void:
                self._whole = plan.step
            self.scheduler.update(StepResult(plan.step, void=void))
        self._spent_s = self._duration(plan)
        self.busy_s += self._spent_s
        self.ends_s = self._clock() + self._spent_s

    def _send_more(self, *, may_preempt: bool) -> None:
        if (plan := self.scheduler.interrupt()) is not None:
            self._plans.append(plan)
        while (plan := self.scheduler.plan_ahead(may_preempt=may_preempt)) is not None:
            self._plans.append(plan)

    def _duration(self, plan: StepPlan) -> float:
        work = plan.work
        if isinstance(work, Prefill):
            self.computed += work.num_tokens
            self.padded += work.bucket - work.num_tokens
            return self._chunk_s(work.bucket)
        assert isinstance(work, Decode)
        rows = len(work.slots)
        self.computed += rows
        self.padded += work.bucket - rows
        return self._decode_s(work.bucket)
