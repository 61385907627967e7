"""Who gives way: when blocks run out, and when something more urgent waits."""

from collections.abc import Iterable
from typing import Protocol

from scheduler_svc.requests.request import Request


class PreemptionPolicy(Protocol):
    """Chooses among running requests. A preempted request waits again and loses its blocks, never its tokens."""

    def victim(self, running: Iterable[Request]) -> Request | None:
        """The running request that can best wait; None if none runs."""

    def outranks(self, waiting: Request, running: Request) -> bool:
        """Whether a waiting request may take the place of a running one. Never of one whose ``priority`` is as low a number as its own."""


class LatestOfLeastUrgent:
    """The running request of the largest rank gives way: the least urgent and latest, so that the first in line always gets through.

    A waiting request preempts only those of lower priority, and not those that waited long enough to have been promoted before it: what
    ageing gave, a later arrival does not take.
    """

    def victim(self, running: Iterable[Request]) -> Request | None:
        """See the interface."""
        return max(running, key=lambda request: request.rank, default=None)

    def outranks(self, waiting: Request, running: Request) -> bool:
        """See the interface."""
        return waiting.priority < running.priority and waiting.rank < running.rank
