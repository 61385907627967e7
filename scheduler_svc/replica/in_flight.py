"""Plans whose results are not back."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from protos.errors import Internal
from scheduler_svc.kv.copies import Copies
from scheduler_svc.replica.step_plan import Decode, StepPlan, StepResult
from scheduler_svc.requests.request import Request


@dataclass(slots=True)
class Pending:
    """A plan whose result is not back, or not its last one.

    Attributes:
        requests: who is in its work, in the plan's order.
        planned_s: clock reading when it was sent.
        left: slots that were given up since.
        results: how many came.
    """

    plan: StepPlan
    requests: Sequence[Request]
    copies: Copies | None
    planned_s: float
    left: set[int] = field(default_factory=set)
    results: int = 0

    @property
    def lease(self) -> int:
        """Steps that it allows."""
        work = self.plan.work
        return work.lease if isinstance(work, Decode) else 1


class InFlight:
    """Plans in the order in which they were sent, which is the one in which they are answered."""

    def __init__(self) -> None:
        """Nothing is under way."""
        self._plans: deque[Pending] = deque()

    def __bool__(self) -> bool:
        """Whether results are outstanding."""
        return bool(self._plans)

    @property
    def leasing(self) -> bool:
        """Whether the latest plan is one that leases several steps."""
        return bool(self._plans) and self._plans[-1].lease > 1

    def send(self, pending: Pending) -> None:
        """A plan is sent."""
        self._plans.append(pending)

    def leave(self, slot: int) -> None:
        """What comes for ``slot`` from the plans that are under way is of nobody any more."""
        for pending in self._plans:
            pending.left.add(slot)

    def clear(self) -> None:
        """No result will come."""
        self._plans.clear()

    def answered(self, result: StepResult) -> Pending:
        """The plan that a result is of; forgotten if this is its last one.

        Raises:
            Internal: if no such plan is outstanding, or it allowed fewer steps.
        """
        pending = self._plans[0] if self._plans else None
        if pending is None or pending.plan.step != result.step:
            raise Internal(
                f"the worker answered step {result.step}, expected {pending.plan.step if pending else 'none'}"
            )
        if pending.results and pending.results == pending.lease:
            raise Internal(
                f"the worker ran more steps than the {pending.lease} that plan {result.step} allowed"
            )
        pending.results += 1
        if result.last or result.error is not None or pending.lease == 1:
            self._plans.popleft()
        return pending
