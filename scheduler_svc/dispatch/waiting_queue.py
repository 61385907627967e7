"""The queue of requests that wait for a slot."""

from collections.abc import Hashable, Iterator

from scheduler_svc.policy.order import OrderPolicy
from scheduler_svc.requests.request import Request


class WaitingQueue:
    """The queue that all replicas share; its policy decides which request is next.

    A request that returns after a preemption or a lost worker keeps its arrival and so its place.
    A skipped request stays in the queue and keeps its tenant's claim, but :meth:`peek` passes over it until
    it is brought back.
    """

    def __init__(self, order: OrderPolicy) -> None:
        """Starts empty; `order` belongs to this queue alone."""
        self._order = order
        self._members: dict[str, Request] = {}
        self._num_tokens = 0
        self._skipped: dict[Hashable, dict[str, Request]] = {}  # by group, then by request id
        self._group: dict[str, Hashable] = {}  # the group of each skipped request

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return self._members.get(request.request_id) is request

    def __iter__(self) -> Iterator[Request]:
        """Yields every member once, in no particular order; the queue must not change meanwhile."""
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
        """Returns the next request without removing it.

        `now` is in seconds on the clock of `Request.arrival_s`.
        """
        return self._order.head(now)

    def remove(self, request: Request) -> bool:
        """Removes a request, skipped or not; returns False if it is not in the queue."""
        if request not in self:
            return False
        self._return(request)
        del self._members[request.request_id]
        self._num_tokens -= len(request.token_ids)
        self._order.remove(request)
        return True

    def skip(self, request: Request, group: Hashable) -> None:
        """Lets other requests pass a member until :meth:`bring_back` retries the oldest of its `group`."""
        self._order.skip(request)
        self._skipped.setdefault(group, {})[request.request_id] = request
        self._group[request.request_id] = group

    def bring_back(self, group: Hashable | None = None) -> None:
        """Returns the oldest skipped request of `group`, or of every group, to its place in the order."""
        for requests in list(self._skipped.values()) if group is None else [self._skipped.get(group)]:
            if requests:
                self._return(min(requests.values(), key=lambda request: request.rank))

    def bring_all_back(self) -> None:
        """Returns every skipped request to its place, because the groups are no longer valid."""
        for requests in list(self._skipped.values()):
            for request in list(requests.values()):
                self._return(request)

    def _return(self, request: Request) -> None:
        if request.request_id not in self._group:
            return
        group = self._group.pop(request.request_id)
        del self._skipped[group][request.request_id]
        if not self._skipped[group]:
            del self._skipped[group]
        self._order.restore(request)

    def charge(self, tenant: str, tokens: int) -> None:
        """Charges a tenant for tokens: its prompt at admission, then one per sequence and decode step."""
        self._order.charge(tenant, tokens)

    def rank(self, request: Request) -> tuple[float, int]:
        """Returns the rank that the request will have among running requests."""
        return self._order.rank(request)

    def drain(self) -> list[Request]:
        """Removes all requests and returns them in order."""
        for request in self._members.values():
            self._return(request)
        self._members.clear()
        self._num_tokens = 0
        return self._order.drain()
