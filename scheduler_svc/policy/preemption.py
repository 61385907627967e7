"""Chooses the running request to preempt, when blocks run out or a more urgent request waits."""

from collections.abc import Iterable
from typing import Protocol

from scheduler_svc.requests.request import Request


class PreemptionPolicy(Protocol):
    """Chooses among running requests. A preempted request loses its blocks, keeps its tokens."""

    def victim(self, running: Iterable[Request]) -> Request | None:
        """Returns the running request to preempt; None if none runs."""

    def outranks(self, waiting: Request, running: Request) -> bool:
        """Whether a waiting request may preempt a running one; only if its ``priority`` is a lower number."""


class LatestOfLeastUrgent:
    """Preempts the running request with the largest rank, so that the first in order always makes progress.

    A waiting request preempts only requests of lower priority that ageing has not promoted before it: a later
    arrival does not undo a promotion.
    """

    def victim(self, running: Iterable[Request]) -> Request | None:
        """See :class:`PreemptionPolicy`."""
        return max(running, key=lambda request: request.rank, default=None)

    def outranks(self, waiting: Request, running: Request) -> bool:
        """See :class:`PreemptionPolicy`."""
        return waiting.priority < running.priority and waiting.rank < running.rank
