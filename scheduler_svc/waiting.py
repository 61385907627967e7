"""Requests that wait for a slot, in the order in which they should get one."""

from collections.abc import Iterator

from scheduler_svc.policy.order import OrderPolicy
from scheduler_svc.request import Request


class WaitingQueue:
    """The queue that all replicas share: who waits, how much there is to do, and by its policy whose turn it is.

    A request that comes back (preempted, or its worker was lost) keeps its arrival and so its place.
    """

    def __init__(self, order: OrderPolicy) -> None:
        """Starts empty; ``order`` is used by this queue alone."""
        self._order = order
        self._members: dict[str, Request] = {}
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return self._members.get(request.request_id) is request

    def __iter__(self) -> Iterator[Request]:
        """Every member once, in no particular order; the queue must not change meanwhile."""
        return iter(self._members.values())

    @property
    def num_tokens(self) -> int:
        """Tokens that the waiting requests have to prefill."""
        return self._num_tokens

    def add(self, request: Request) -> None:
        """Adds a request that is not in the queue. Its tokens must not change while it waits."""
        self._members[request.request_id] = request
        self._num_tokens += len(request.token_ids)
        self._order.add(request)

    def peek(self, now: float) -> Request | None:
        """The request whose turn it is at ``now``, seconds on the clock of ``Request.arrival_s``; it stays in the queue."""
        return self._order.head(now)

    def remove(self, request: Request) -> bool:
        """Takes a request out, wherever it is; False if it is not in the queue."""
        if request not in self:
            return False
        del self._members[request.request_id]
        self._num_tokens -= len(request.token_ids)
        self._order.remove(request)
        return True

    def charge(self, tenant: str, tokens: int) -> None:
        """A tenant was served tokens: those of a prompt at admission, one per running sequence with every decode step."""
        self._order.charge(tenant, tokens)

    def rank(self, request: Request) -> tuple[float, int]:
        """Where the request will stand among those that run."""
        return self._order.rank(request)

    def drain(self) -> list[Request]:
        """Takes all requests out, in order."""
        self._members.clear()
        self._num_tokens = 0
        return self._order.drain()
