"""The order in which a worker runs plans, on a simulated device."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from protos.steps import Decode, StepPlan, StepResult, slots_of


def goes_on(plan: StepPlan, result: StepResult) -> bool:
    """Whether a decode step ends no work: each slot of the plan got one token, or was skipped."""
    return result.error is None and all(
        len(output.token_ids) == 1 and output.error is None for output in result.outputs
    )


class SimulatedWorker:
    """Runs plans in order, step by step, as `worker_svc.api.plan_runner` does."""

    def __init__(self, run_step: Callable[[StepPlan], StepResult]) -> None:
        """Starts without plans; `run_step` applies a plan and runs one step of its work."""
        self._run_step = run_step
        self._waiting: deque[StepPlan] = deque()
        # The plan that runs, and how many of its steps have run.
        self._running: StepPlan | None = None
        self._num_run = 0

    @property
    def has_work(self) -> bool:
        """Whether a step is to be run."""
        return self._running is not None or bool(self._waiting)

    def take(self, plan: StepPlan) -> None:
        """Takes a plan that has arrived."""
        self._waiting.append(plan)

    def run(self) -> StepResult:
        """Runs one step."""
        if self._running is None:
            self._running, self._num_run = self._waiting.popleft(), 0
        plan = self._running
        first = self._num_run == 0
        result = self._run_step(plan if first else StepPlan(plan.step, plan.work))
        self._num_run += 1
        most = plan.work.steps if isinstance(plan.work, Decode) else 1
        last = (
            self._num_run == most
            or not result.num_steps
            or any(newer.interrupts for newer in self._waiting)
            or not goes_on(plan, result)
            or len(slots_of(plan.work)) != len(result.token_ids or result.outputs)
        )
        self._running = None if last else plan
        return replace(result, last=last)
