"""Who gives way: when blocks run out, and when something more urgent waits."""

from collections.abc import Iterable
from typing import Protocol

from scheduler_svc.request import Request


class PreemptionPolicy(Protocol):
    """Chooses among running requests. A preempted request waits again and loses its blocks, never its tokens."""

    def victim(self, running: Iterable[Request]) -> Request | None:
        """The running request that can best wait; None if none runs."""

    def outranks(self, waiting: Request, running_priority: int) -> bool:
        """Whether a waiting request may take the place of a running one of that priority."""


class LatestOfLeastUrgent:
    """Of the least urgent priority the latest arrival gives way, so that the oldest always gets through.

    Only a difference in priority makes a waiting request preempt a running one: waiting makes it older, not more important.
    """

    def victim(self, running: Iterable[Request]) -> Request | None:
        """See the interface."""
        return max(running, key=lambda request: (request.priority, request.arrival), default=None)

    def outranks(self, waiting: Request, running_priority: int) -> bool:
        """See the interface."""
        return waiting.priority < running_priority
