"""Who gives way when blocks run out."""

from collections.abc import Iterable

from scheduler_svc.request import Request


def choose_victim(running: Iterable[Request]) -> Request | None:
    """The request that can best wait: of the least urgent priority the latest arrival, so that the oldest always gets through."""
    return max(running, key=lambda request: (request.priority, request.arrival), default=None)
