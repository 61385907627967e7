"""The order in which a worker runs plans, on a simulated device."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from protos.steps import Decode, StepPlan, StepResult, slots_of


def next_leased(plan: StepPlan) -> StepPlan:
    """Returns the next step of a leasing plan: one position further, with nothing else to do."""
    assert isinstance(plan.work, Decode)
    positions = tuple(position + 1 for position in plan.work.positions)
    return StepPlan(plan.step, replace(plan.work, positions=positions))


def one_token_for_each(plan: StepPlan, result: StepResult) -> bool:
    """Whether a result has one token for each slot of the plan's work, in either form."""
    outputs = {output.slot: output for output in result.outputs}
    return len(result.token_ids or outputs) == len(slots_of(plan.work)) and all(
        len(output.token_ids) == 1 and output.error is None for output in outputs.values()
    )


class SimulatedWorker:
    """Runs plans in order, each step of a lease by itself, as `worker_svc.api.leases` does."""

    def __init__(self, run_step: Callable[[StepPlan], StepResult]) -> None:
        self._run_step = run_step
        self._waiting: deque[StepPlan] = deque()
        # The next step of the plan that runs, and its index in the lease.
        self._running: StepPlan | None = None
        self._index = 0
        # The number of the last plan that ran whole.
        self._whole = 0

    @property
    def has_work(self) -> bool:
        """Whether a step is to be run."""
        return self._running is not None or bool(self._waiting)

    def take(self, plan: StepPlan) -> None:
        """Takes a plan that has arrived."""
        self._waiting.append(plan)

    def run(self) -> StepResult:
        """Runs one step, or passes over a plan that is void."""
        if self._running is None:
            self._running, self._index = self._waiting.popleft(), 0
            if self._running.continues and self._whole != self._running.step - 1:
                plan, self._running = self._running, None
                result = self._run_step(replace(plan, work=None))
                return replace(result, void=result.error is None)
        plan, index = self._running, self._index
        lease = plan.work.lease if isinstance(plan.work, Decode) else 1
        result = self._run_step(plan)
        jumped = any(len(output.token_ids) > 1 for output in result.outputs)
        ended = index + 1 == lease
        if ended and not jumped and result.error is None:
            self._whole = plan.step
        superseded = any(not newer.continues for newer in self._waiting)
        last = ended or superseded or not one_token_for_each(plan, result)
        self._running, self._index = None if last else next_leased(plan), index + 1
        return replace(result, lease_index=index, last=last)
