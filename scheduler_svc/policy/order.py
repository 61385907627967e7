"""The order in which waiting requests are scheduled."""

import heapq
import itertools
import math
from collections.abc import Mapping
from typing import Protocol

from scheduler_svc.policy.tenant_counters import TenantCounters
from scheduler_svc.requests.request import Request

# Number of stale heap entries to tolerate before a rebuild.
_MAX_STALE = 16
# A shorter period would be below the resolution of clocks.
SHORTEST_AGEING_S = 0.001


class OrderPolicy(Protocol):
    """Holds the waiting requests and picks the next one. The caller adds each request at most once."""

    def add(self, request: Request) -> None:
        """Adds a new request, or one that ran and waits again with its old ``arrival``."""

    def remove(self, request: Request) -> None:
        """Removes a request."""

    def skip(self, request: Request) -> None:
        """Removes a request that keeps waiting elsewhere; :meth:`restore` adds it again."""

    def restore(self, request: Request) -> None:
        """Adds a skipped request again, as if it had never been removed."""

    def head(self, now: float) -> Request | None:
        """Returns the next request at ``now``, on the clock of ``Request.arrival_s``; None if none waits."""

    def charge(self, tenant: str, tokens: int) -> None:
        """Charges a tenant for served tokens."""

    def rank(self, request: Request) -> tuple[float, int]:
        """Returns the place among running requests: the smallest runs first, the largest is preempted first.

        It does not change with time, so a request that ageing promoted to a slot keeps it against later
        arrivals.
        """


class _ArrivalQueue:
    """Requests in order of arrival, with removal from anywhere.

    Removal is lazy: the arrival of a removed request stays in the heap until it surfaces or half of the heap
    is stale. The first entry is never stale. A request that returns may be in the heap twice, which does no
    harm.
    """

    __slots__ = ("_heap", "requests")

    def __init__(self) -> None:
        self._heap: list[int] = []
        # By arrival, which is unique.
        self.requests: dict[int, Request] = {}

    @property
    def head(self) -> Request:
        """The earliest arrival; the queue must not be empty."""
        return self.requests[self._heap[0]]

    def add(self, request: Request) -> None:
        """Adds a request."""
        self.requests[request.arrival] = request
        heapq.heappush(self._heap, request.arrival)

    def remove(self, request: Request) -> None:
        """Removes a request."""
        del self.requests[request.arrival]
        if len(self._heap) > 2 * len(self.requests) + _MAX_STALE:
            self._heap = sorted(self.requests)
        while self._heap and self._heap[0] not in self.requests:
            heapq.heappop(self._heap)


class ArrivalOrder:
    """First come, first served, regardless of priority and tenant."""

    def __init__(self) -> None:
        self._queue = _ArrivalQueue()

    def add(self, request: Request) -> None:
        """Adds a request."""
        self._queue.add(request)

    def remove(self, request: Request) -> None:
        """Removes a request."""
        self._queue.remove(request)

    def skip(self, request: Request) -> None:
        """Removes a request until it is restored."""
        self._queue.remove(request)

    def restore(self, request: Request) -> None:
        """Adds a skipped request again."""
        self._queue.add(request)

    def head(self, now: float) -> Request | None:  # noqa: ARG002 - the order does not depend on time
        """Returns the earliest arrival."""
        return self._queue.head if self._queue.requests else None

    def charge(self, tenant: str, tokens: int) -> None:
        """Does nothing: the order ignores tenants."""

    def rank(self, request: Request) -> tuple[float, int]:
        """Ranks by arrival."""
        return (0.0, request.arrival)


# (level, the tenant's counter, arrival); the smallest is next.
_Key = tuple[int, float, int]


class _TenantQueue(_ArrivalQueue):
    """The requests of one tenant and priority, represented by the first of them.

    Among requests of equal priority, the earlier is never at a higher level, so the first has the queue's
    smallest key at all times.
    """

    __slots__ = ("key", "priority", "promotes_s", "tenant")

    def __init__(self, tenant: str, priority: int) -> None:
        super().__init__()
        self.tenant = tenant
        self.priority = priority
        self.key: _Key | None = None
        """The queue's valid entry in the heap of queues; None once the queue is empty."""
        self.promotes_s = math.inf
        """Clock reading of the queue's valid entry in the heap of promotions."""


class PriorityFairOrder:
    """Orders by priority, then fairly by tenant, then by arrival, and promotes waiting requests.

    A request's level is its priority minus one for every ``ageing_s`` seconds since its arrival; the lowest
    level is next. If the priorities of two requests differ by d, the less urgent one is next at the latest if
    it arrived (d + 1) x ``ageing_s`` before the other. Within a level, the tenant served least for its weight
    is next (:class:`TenantCounters`), with its earliest request.

    There is one queue per tenant and priority, and a heap of queues by the key of their first request. A key
    that grew (its tenant was served, its first request left) is corrected when it surfaces. A key that fell
    (an earlier arrival returned, a first request was promoted) is entered again. Every operation takes
    amortized O(log queues + log requests in the queue); a promotion costs that once per queue and
    ``ageing_s``.

    Requires that ``arrival_s`` never falls as ``arrival`` grows.
    """

    def __init__(
        self, ageing_s: float | None = None, tenant_weights: Mapping[str, float] | None = None
    ) -> None:
        """Starts empty.

        Args:
            ageing_s: seconds of waiting that are worth one level; None or 0 disables ageing.
            tenant_weights: weights of tenants that differ from 1.

        Raises:
            ValueError: naming the bad weight, or an ageing period below a millisecond.
        """
        if ageing_s and not ageing_s >= SHORTEST_AGEING_S:
            raise ValueError(f"ageing_s must be 0 or at least {SHORTEST_AGEING_S} seconds, not {ageing_s}")
        self._ageing_s = ageing_s or None
        self._counters = TenantCounters(tenant_weights or {})
        self._queues: dict[tuple[str, int], _TenantQueue] = {}
        # Per tenant, its queues plus its skipped requests; the tenant is active while there are any.
        self._activity: dict[str, int] = {}
        # Numbers heap entries, because queues do not compare.
        self._entries = itertools.count()
        self._heap: list[tuple[_Key, int, _TenantQueue]] = []
        self._promotions: list[tuple[float, int, _TenantQueue]] = []
        self._now = -math.inf

    def add(self, request: Request) -> None:
        """Adds a request; the first one of a tenant makes the tenant active."""
        tenant = request.tenant
        queue = self._queues.get((tenant, request.priority))
        if queue is None:
            queue = self._queues[tenant, request.priority] = _TenantQueue(tenant, request.priority)
            if tenant not in self._activity:
                self._counters.activate(tenant)
            self._activity[tenant] = self._activity.get(tenant, 0) + 1
        queue.add(request)
        if queue.head is request:
            self._enter(queue)

    def remove(self, request: Request) -> None:
        """Removes a request."""
        tenant = request.tenant
        queue = self._queues[tenant, request.priority]
        queue.remove(request)
        if queue.requests:
            return
        queue.key = None
        queue.promotes_s = math.inf
        del self._queues[tenant, request.priority]
        self._activity[tenant] -= 1
        if not self._activity[tenant]:
            del self._activity[tenant]
            self._counters.deactivate(tenant)
        self._sweep()

    def skip(self, request: Request) -> None:
        """Removes a request that keeps waiting, so its tenant stays active."""
        self._activity[request.tenant] += 1
        self.remove(request)

    def restore(self, request: Request) -> None:
        """Adds a skipped request again."""
        self.add(request)
        self._activity[request.tenant] -= 1

    def head(self, now: float) -> Request | None:
        """Returns the next request at ``now``; a reading before an earlier one counts as the earlier one."""
        self._promote(now)
        while self._heap:
            key, _, queue = self._heap[0]
            if queue.key is key and key == self._key(queue.head):
                return queue.head
            heapq.heappop(self._heap)
            if queue.key is key:
                self._enter(queue)
        return None

    def charge(self, tenant: str, tokens: int) -> None:
        """Moves the tenant behind tenants that were served less."""
        self._counters.charge(tenant, tokens)

    def rank(self, request: Request) -> tuple[float, int]:
        """Ranks by priority and arrival; one level is worth ``ageing_s`` seconds, without ageing any time."""
        if self._ageing_s is None:
            return (request.priority, request.arrival)
        return (request.priority * self._ageing_s + request.arrival_s, request.arrival)

    def _key(self, request: Request) -> _Key:
        level = request.priority - self._levels_gained(request)
        return level, self._counters[request.tenant], request.arrival

    def _levels_gained(self, request: Request) -> int:
        """Returns the ageing periods since arrival, exactly as :meth:`_enter` computes times."""
        if self._ageing_s is None or self._now <= request.arrival_s:
            return 0
        gained = math.floor((self._now - request.arrival_s) / self._ageing_s)
        # A quotient close to a whole number may have been rounded to the wrong side.
        if request.arrival_s + (gained + 1) * self._ageing_s <= self._now:
            gained += 1
        elif request.arrival_s + gained * self._ageing_s > self._now:
            gained -= 1
        return gained

    def _enter(self, queue: _TenantQueue) -> None:
        """Enters a queue by the key of its first request; its older entries become stale."""
        head = queue.head
        queue.key = self._key(head)
        heapq.heappush(self._heap, (queue.key, next(self._entries), queue))
        if self._ageing_s is not None:
            promotes_s = head.arrival_s + (head.priority - queue.key[0] + 1) * self._ageing_s
            if promotes_s != queue.promotes_s:
                queue.promotes_s = promotes_s
                heapq.heappush(self._promotions, (promotes_s, next(self._entries), queue))
        self._sweep()

    def _promote(self, now: float) -> None:
        """Re-enters the queues with a first request that has reached a lower level by ``now``."""
        self._now = max(now, self._now)
        while self._promotions and self._promotions[0][0] <= self._now:
            promotes_s, _, queue = heapq.heappop(self._promotions)
            if queue.promotes_s == promotes_s:
                self._enter(queue)

    def _sweep(self) -> None:
        """Drops stale heap entries once they are the majority."""
        most = 2 * len(self._queues) + _MAX_STALE
        if len(self._heap) > most:
            self._heap = [entry for entry in self._heap if entry[2].key is entry[0]]
            heapq.heapify(self._heap)
        if len(self._promotions) > most:
            self._promotions = [
                (queue.promotes_s, next(self._entries), queue) for queue in self._queues.values()
            ]
            heapq.heapify(self._promotions)
