"""Plans that the worker has not answered in full."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from protos.errors import Internal
from protos.steps import Decode, StepPlan, StepResult
from scheduler_svc.kv.copies import PendingCopy
from scheduler_svc.requests.request import Request


@dataclass(slots=True)
class InFlight:
    """A plan that awaits its last result."""

    plan: StepPlan
    requests: Sequence[Request]
    """The requests in the plan's work, in its order."""
    copies: Sequence[PendingCopy]
    """The block copies that the plan carries."""
    sent_s: float
    """Clock reading when the plan was sent."""
    left: set[int] = field(default_factory=set)
    """Slots that were released since; their results are ignored."""
    num_results: int = 0
    """Results received so far."""

    @property
    def lease(self) -> int:
        """Decode steps that the plan allows."""
        work = self.plan.work
        return work.lease if isinstance(work, Decode) else 1


class StepsInFlight:
    """Plans in the order in which they were sent, which is also the order of their results."""

    def __init__(self) -> None:
        """Starts empty."""
        self._steps: deque[InFlight] = deque()

    def __bool__(self) -> bool:
        """Whether results are outstanding."""
        return bool(self._steps)

    @property
    def leasing(self) -> bool:
        """Whether the latest plan leases several steps."""
        return bool(self._steps) and self._steps[-1].lease > 1

    def send(self, step: InFlight) -> None:
        """Adds a plan that is sent now."""
        self._steps.append(step)

    def ignore_slot(self, slot: int) -> None:
        """Ignores outstanding results for ``slot``."""
        for step in self._steps:
            step.left.add(slot)

    def clear(self) -> None:
        """Forgets all plans; no result will come."""
        self._steps.clear()

    def match(self, result: StepResult) -> InFlight:
        """Returns the plan that a result answers, and removes it if this is its last result.

        Raises:
            Internal: if no such plan is outstanding, or it allowed fewer steps.
        """
        step = self._steps[0] if self._steps else None
        if step is None or step.plan.step != result.step:
            raise Internal(
                f"the worker answered step {result.step}, expected {step.plan.step if step else 'none'}"
            )
        if step.num_results and step.num_results == step.lease:
            raise Internal(f"the worker ran more steps than the {step.lease} that plan {result.step} allowed")
        step.num_results += 1
        if result.last or result.error is not None or step.lease == 1:
            self._steps.popleft()
        return step
