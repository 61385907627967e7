"""Requests that wait for a slot, in the order in which they should get one."""

from collections.abc import Hashable, Iterator

from scheduler_svc.policy.order import OrderPolicy
from scheduler_svc.requests.request import Request


class WaitingQueue:
    """The queue that all replicas share: who waits, how much there is to do, and by its policy whose turn it is.

    A request that comes back (preempted, or its worker was lost) keeps its arrival and so its place. One may be put aside: it waits as all
    others do, and its tenant's claim stays, but it has no turn until it is brought back.
    """

    def __init__(self, order: OrderPolicy) -> None:
        """Starts empty; ``order`` is used by this queue alone."""
        self._order = order
        self._members: dict[str, Request] = {}
        self._num_tokens = 0
        # Who is aside, by group and id; and the group of each.
        self._aside: dict[Hashable, dict[str, Request]] = {}
        self._group: dict[str, Hashable] = {}

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
        self._return(request)
        del self._members[request.request_id]
        self._num_tokens -= len(request.token_ids)
        self._order.remove(request)
        return True

    def put_aside(self, request: Request, group: Hashable) -> None:
        """Lets others pass a member; ``group`` is what it has in common with those that :meth:`bring_back` is to try one by one."""
        self._order.step_aside(request)
        self._aside.setdefault(group, {})[request.request_id] = request
        self._group[request.request_id] = group

    def bring_back(self, group: Hashable | None = None) -> None:
        """Gives the first member of a group that is aside its turn again, or the first of every group."""
        for requests in list(self._aside.values()) if group is None else [self._aside.get(group)]:
            if requests:
                self._return(min(requests.values(), key=lambda one: one.rank))

    def bring_all_back(self) -> None:
        """Gives everyone who is aside its turn again: the groups are not what they were."""
        for requests in list(self._aside.values()):
            for request in list(requests.values()):
                self._return(request)

    def _return(self, request: Request) -> None:
        if request.request_id not in self._group:
            return
        group = self._group.pop(request.request_id)
        del self._aside[group][request.request_id]
        if not self._aside[group]:
            del self._aside[group]
        self._order.come_back(request)

    def charge(self, tenant: str, tokens: int) -> None:
        """A tenant was served tokens: those of a prompt at admission, one per running sequence with every decode step."""
        self._order.charge(tenant, tokens)

    def rank(self, request: Request) -> tuple[float, int]:
        """Where the request will stand among those that run."""
        return self._order.rank(request)

    def drain(self) -> list[Request]:
        """Takes all requests out, in order."""
        for request in self._members.values():
            self._return(request)
        self._members.clear()
        self._num_tokens = 0
        return self._order.drain()
