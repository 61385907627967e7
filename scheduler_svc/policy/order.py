"""In which order waiting requests get their turn."""

import heapq
import itertools
import math
from collections.abc import Mapping
from typing import Protocol

from scheduler_svc.policy.tenant_counters import TenantCounters
from scheduler_svc.requests.request import Request

# Stale heap entries that are not worth a rebuild.
_SLACK = 16
# Below, promotions would be finer than what a clock tells apart.
SHORTEST_AGEING_S = 0.001


class OrderPolicy(Protocol):
    """Holds the waiting requests and knows whose turn it is. The queue sees to it that each is in at most once."""

    def add(self, request: Request) -> None:
        """Takes in a request: a new one, or one that ran and comes back with its old ``arrival``."""

    def remove(self, request: Request) -> None:
        """Takes out a request that is in."""

    def step_aside(self, request: Request) -> None:
        """Takes out a request that is in and goes on waiting elsewhere; until :meth:`come_back`, which is sure to follow."""

    def come_back(self, request: Request) -> None:
        """Takes in a request that stepped aside, as if it had never been out."""

    def head(self, now: float) -> Request | None:
        """Whose turn it is at ``now`` (seconds, on the clock of ``Request.arrival_s``); None if nothing waits."""

    def charge(self, tenant: str, tokens: int) -> None:
        """A tenant was served that many tokens."""

    def drain(self) -> list[Request]:
        """Takes all requests out, in order."""

    def rank(self, request: Request) -> tuple[float, int]:
        """Where the request stands among others that run: the smallest goes first, and the largest gives way.

        It does not change with time, so that who was promoted to a slot keeps it against what comes later.
        """


class _Line:
    """Requests in order of arrival, with removal from anywhere.

    Removal is lazy: a removed request's arrival stays in the heap until it surfaces or until half of the heap is stale. The first one
    is never stale. A request that comes back may be in the heap twice, which changes nothing.
    """

    __slots__ = ("_heap", "requests")

    def __init__(self) -> None:
        self._heap: list[int] = []
        # By arrival, which is unique.
        self.requests: dict[int, Request] = {}

    @property
    def head(self) -> Request:
        """The earliest arrival; the line is not empty."""
        return self.requests[self._heap[0]]

    def add(self, request: Request) -> None:
        """Takes in a request that is not in."""
        self.requests[request.arrival] = request
        heapq.heappush(self._heap, request.arrival)

    def remove(self, request: Request) -> None:
        """Takes out a request that is in."""
        del self.requests[request.arrival]
        if len(self._heap) > 2 * len(self.requests) + _SLACK:
            self._heap = sorted(self.requests)
        while self._heap and self._heap[0] not in self.requests:
            heapq.heappop(self._heap)


class ArrivalOrder:
    """First come, first served, whatever the priority and the tenant."""

    def __init__(self) -> None:
        self._line = _Line()

    def add(self, request: Request) -> None:
        """Takes in a request."""
        self._line.add(request)

    def remove(self, request: Request) -> None:
        """Takes out a request that is in."""
        self._line.remove(request)

    def step_aside(self, request: Request) -> None:
        """Takes out a request for a while."""
        self._line.remove(request)

    def come_back(self, request: Request) -> None:
        """Takes it in again."""
        self._line.add(request)

    def head(self, now: float) -> Request | None:  # noqa: ARG002 - time changes nothing here
        """The earliest arrival."""
        return self._line.head if self._line.requests else None

    def charge(self, tenant: str, tokens: int) -> None:
        """Changes nothing."""

    def rank(self, request: Request) -> tuple[float, int]:
        """By arrival."""
        return (0.0, request.arrival)

    def drain(self) -> list[Request]:
        """Takes all requests out, in order of arrival."""
        line, self._line = self._line, _Line()
        return [line.requests[arrival] for arrival in sorted(line.requests)]


# (level, the tenant's counter, arrival): the smallest is next.
_Key = tuple[int, float, int]


class _TenantLine(_Line):
    """The requests of one tenant and priority: all that has to be known about them is who is first.

    Of equal priority, whoever came earlier is never at a higher level, so the first one has the line's smallest key at all times.

    Attributes:
        key: the line's valid entry in the heap of lines; None once the line is empty.
        promotes_s: clock reading of its valid entry in the heap of promotions.
    """

    __slots__ = ("key", "priority", "promotes_s", "tenant")

    def __init__(self, tenant: str, priority: int) -> None:
        super().__init__()
        self.tenant = tenant
        self.priority = priority
        self.key: _Key | None = None
        self.promotes_s = math.inf


class PriorityFairOrder:
    """Priority first, then fair between tenants, then arrival; who waits is promoted, so nothing starves.

    A request's level is its priority less one for every ``ageing_s`` seconds since it arrived; the lowest level is next. So of two
    requests whose priorities differ by d, the less urgent one is next at the latest when it came (d + 1) x ``ageing_s`` before the
    other, whatever else comes. Within a level it is the tenant's turn that was served least for its weight (:class:`TenantCounters`),
    and its earliest request's.

    Keeps one line per tenant and priority and a heap of lines by the key of their first request. Keys that only grew (the tenant was
    served, the first request left) are put right when they surface; keys that fall (an earlier arrival comes back, a first request
    is promoted) are entered anew. Every operation is O(log lines + log requests in the line), amortized; a promotion costs that once per
    line and ``ageing_s``, however many requests are in the line.

    Relies on ``arrival_s`` not falling as ``arrival`` grows.
    """

    def __init__(
        self, ageing_s: float | None = None, tenant_weights: Mapping[str, float] | None = None
    ) -> None:
        """Starts empty.

        Args:
            ageing_s: seconds of waiting that are worth one level; None or 0: waiting is worth nothing.
            tenant_weights: shares of the tenants that have another one than 1.

        Raises:
            ValueError: naming the bad weight, or an ageing below a millisecond.
        """
        if ageing_s and not ageing_s >= SHORTEST_AGEING_S:
            raise ValueError(f"ageing_s must be 0 or at least {SHORTEST_AGEING_S} seconds, not {ageing_s}")
        self._ageing_s = ageing_s or None
        self._counters = TenantCounters(tenant_weights or {})
        self._lines: dict[tuple[str, int], _TenantLine] = {}
        # Lines that each tenant has, and requests aside; the tenant is active while there are any.
        self._lines_of: dict[str, int] = {}
        # Entries that were pushed later are told apart by their number; lines do not compare.
        self._entries = itertools.count()
        self._heap: list[tuple[_Key, int, _TenantLine]] = []
        self._promotions: list[tuple[float, int, _TenantLine]] = []
        self._now = -math.inf

    def add(self, request: Request) -> None:
        """Takes in a request; a tenant's first one is when the tenant becomes active."""
        tenant = request.tenant
        line = self._lines.get((tenant, request.priority))
        if line is None:
            line = self._lines[tenant, request.priority] = _TenantLine(tenant, request.priority)
            if tenant not in self._lines_of:
                self._counters.activate(tenant)
            self._lines_of[tenant] = self._lines_of.get(tenant, 0) + 1
        line.add(request)
        if line.head is request:
            self._enter(line)

    def remove(self, request: Request) -> None:
        """Takes out a request that is in."""
        tenant = request.tenant
        line = self._lines[tenant, request.priority]
        line.remove(request)
        if line.requests:
            return
        line.key = None
        line.promotes_s = math.inf
        del self._lines[tenant, request.priority]
        self._lines_of[tenant] -= 1
        if not self._lines_of[tenant]:
            del self._lines_of[tenant]
            self._counters.deactivate(tenant)
        self._sweep()

    def step_aside(self, request: Request) -> None:
        """Takes out a request that waits still, so its tenant stays active."""
        self._lines_of[request.tenant] += 1
        self.remove(request)

    def come_back(self, request: Request) -> None:
        """Takes it in again."""
        self.add(request)
        self._lines_of[request.tenant] -= 1

    def head(self, now: float) -> Request | None:
        """Whose turn it is at ``now``; a reading before an earlier one counts as that one."""
        self._promote(now)
        while self._heap:
            key, _, line = self._heap[0]
            if line.key is key and key == self._key(line.head):
                return line.head
            heapq.heappop(self._heap)
            if line.key is key:
                self._enter(line)
        return None

    def charge(self, tenant: str, tokens: int) -> None:
        """Moves the tenant back behind those that were served less."""
        self._counters.charge(tenant, tokens)

    def rank(self, request: Request) -> tuple[float, int]:
        """A level of priority is worth ``ageing_s`` seconds of having come earlier; without ageing, more than any time."""
        if self._ageing_s is None:
            return (request.priority, request.arrival)
        return (request.priority * self._ageing_s + request.arrival_s, request.arrival)

    def drain(self) -> list[Request]:
        """Takes all requests out, in the order of the last ``now``. Tenants keep their counters."""
        requests = [request for line in self._lines.values() for request in line.requests.values()]
        requests.sort(key=self._key)
        self._counters.deactivate_all()
        self._lines.clear()
        self._lines_of.clear()
        self._heap.clear()
        self._promotions.clear()
        return requests

    def _key(self, request: Request) -> _Key:
        level = request.priority - self._levels_gained(request)
        return level, self._counters[request.tenant], request.arrival

    def _levels_gained(self, request: Request) -> int:
        """The largest n for which n ageing periods have passed since arrival; exactly as :meth:`_enter` computes times."""
        if self._ageing_s is None or self._now <= request.arrival_s:
            return 0
        gained = math.floor((self._now - request.arrival_s) / self._ageing_s)
        # A quotient next to a whole number may have been rounded to the wrong side.
        if request.arrival_s + (gained + 1) * self._ageing_s <= self._now:
            gained += 1
        elif request.arrival_s + gained * self._ageing_s > self._now:
            gained -= 1
        return gained

    def _enter(self, line: _TenantLine) -> None:
        """Puts a line where its first request's key says; older entries of it become stale."""
        head = line.head
        line.key = self._key(head)
        heapq.heappush(self._heap, (line.key, next(self._entries), line))
        if self._ageing_s is not None:
            promotes_s = head.arrival_s + (head.priority - line.key[0] + 1) * self._ageing_s
            if promotes_s != line.promotes_s:
                line.promotes_s = promotes_s
                heapq.heappush(self._promotions, (promotes_s, next(self._entries), line))
        self._sweep()

    def _promote(self, now: float) -> None:
        """Enters lines anew whose first request has reached a lower level by ``now``."""
        self._now = max(now, self._now)
        while self._promotions and self._promotions[0][0] <= self._now:
            promotes_s, _, line = heapq.heappop(self._promotions)
            if line.promotes_s == promotes_s:
                self._enter(line)

    def _sweep(self) -> None:
        """Drops stale entries once they are the majority."""
        most = 2 * len(self._lines) + _SLACK
        if len(self._heap) > most:
            self._heap = [entry for entry in self._heap if entry[2].key is entry[0]]
            heapq.heapify(self._heap)
        if len(self._promotions) > most:
            self._promotions = [(line.promotes_s, next(self._entries), line) for line in self._lines.values()]
            heapq.heapify(self._promotions)
