"""The virtual worker, the only part of the simulation that reads plans."""

from collections import deque
from collections.abc import Callable
from functools import cache

from protos.steps import Decode, Prefill, StepPlan, StepResult
from scheduler_svc.simulation.step_times import StepTimes
from scheduler_svc.workers.step_loop import StepScheduler


class VirtualWorker:
    """Runs the plans of a replica in order, as a worker and its step loop do without any delay.

    A step lasts as long as the model of step times says. Its result reaches the scheduler the moment it ends,
    or with those of later steps if the plan says so, with the same token for every row.
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
        # Plans without their last result; the first runs.
        self._plans: deque[StepPlan] = deque()
        self._num_run = 0
        self._spent_s = 0.0
        # Seconds of each step whose result is not sent.
        self._unsent_s: list[float] = []

    def wake(self) -> None:
        """Sends plans while a step runs; an idle worker needs :meth:`start`."""
        if self.ends_s is not None:
            self._fetch()

    def start(self) -> None:
        """Starts work if there is any and the worker is idle."""
        if self.ends_s is None:
            self._next()

    def finish(self) -> None:
        """Ends the current step, at its time, and starts the next."""
        plan, work = self._plans[0], self._plans[0].work
        self.ends_s = None
        self._num_run += 1
        most = work.steps if isinstance(work, Decode) else 1
        last = self._num_run == most or any(newer.interrupts for newer in list(self._plans)[1:])
        self._unsent_s.append(self._spent_s)
        if last or (isinstance(work, Decode) and len(self._unsent_s) == work.steps_per_result):
            self._send(plan, last=last)
        self._next()

    def _send(self, plan: StepPlan, *, last: bool) -> None:
        """Sends the result of the steps that ran since the last result."""
        work, count, spent_s = plan.work, len(self._unsent_s), sum(self._unsent_s)
        rows = len(work.slots) if isinstance(work, Decode) else int(isinstance(work, Prefill) and work.sample)
        self._unsent_s.clear()
        if last:
            self._plans.popleft()
            self._num_run = 0
        self.scheduler.update(
            StepResult(
                plan.step, (7,) * rows * count, last=last, num_steps=count, execute_us=int(spent_s * 1e6)
            )
        )

    def _next(self) -> None:
        """Fetches plans and starts the next step, if there is one."""
        while True:
            self._dispatch()
            self._fetch()
            if not self._plans:
                return
            plan = self._plans[0]
            if plan.work is not None:
                break
            self._plans.popleft()
            self.scheduler.update(StepResult(plan.step, num_steps=0))
        self._spent_s = self._duration(plan)
        self.busy_s += self._spent_s
        self.ends_s = self._clock() + self._spent_s

    def _fetch(self) -> None:
        while (plan := self.scheduler.next_plan()) is not None:
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
