"""The order of waiting requests.

The most urgent requests are those of the most urgent waiting priority, and those of lower priorities after
``ageing_s`` seconds of waiting for each level in between. Among these, the tenant served least for its weight
is next (:class:`Tenants`), with its earliest request. So ageing never puts a request before the most urgent,
but among them, where its tenant's share and its age let it run.
"""

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Mapping
from typing import ClassVar

from scheduler_svc.policy.tenants import Tenants
from scheduler_svc.requests.request import Request

# Number of stale heap entries to tolerate before a rebuild.
_MAX_STALE = 16
# A shorter period would be below the resolution of clocks.
SHORTEST_AGEING_S = 0.001


class ArrivalQueue:
    """Requests in order of arrival, with removal from anywhere.

    Removal is lazy: the arrival of a removed request stays in the heap until it surfaces or half of the heap
    is stale. The first entry is never stale. A returning request may be in the heap twice, without harm.
    """

    __slots__ = ("_heap", "requests")

    def __init__(self) -> None:
        """Starts empty."""
        self._heap: list[int] = []
        self.requests: dict[int, Request] = {}
        """By arrival, which is unique."""

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


class _Class(ArrivalQueue):
    """The requests of a tenant and priority, represented by the first of them."""

    __slots__ = ("entry", "priority", "tenant")

    def __init__(self, tenant: str, priority: int) -> None:
        super().__init__()
        self.tenant = tenant
        self.priority = priority
        # The valid entry of the class in either heap; None once the class is empty.
        self.entry: _Entry | None = None


# (key, arrival of the first request, unique number of the entry, class). Classes do not compare.
_Entry = tuple[float, int, int, _Class]


class PriorityFairOrder:
    """Orders by priority, then fairly by tenant, then by arrival.

    Each pair of tenant and priority is a class of requests. Classes whose first request is among the most
    urgent are in a heap by counter and arrival, the others in a heap by the time of joining them. A class in
    the wrong place of either heap is moved when it surfaces, and entered again when its key falls because an
    earlier arrival returned. Every operation takes amortized O(log requests).

    Requires that ``arrival_s`` never falls as ``arrival`` grows.
    """

    by_arrival: ClassVar[bool] = False
    """Whether priority and tenant do not count."""

    def __init__(
        self, ageing_s: float | None = None, tenant_weights: Mapping[str, float] | None = None
    ) -> None:
        """Starts empty.

        Args:
            ageing_s: seconds of waiting worth a level of priority; None or 0 disables ageing.
            tenant_weights: weights of tenants other than 1.

        Raises:
            ValueError: naming the bad weight, or an ageing period below a millisecond.
        """
        if ageing_s and not ageing_s >= SHORTEST_AGEING_S:
            raise ValueError(f"ageing_s must be 0 or at least {SHORTEST_AGEING_S} seconds, not {ageing_s}")
        self._ageing_s = ageing_s or None
        self.tenants = Tenants(tenant_weights)
        """Tokens served to each tenant; the queue counts its waiting requests here."""
        self._classes: dict[tuple[str, int], _Class] = {}
        # Classes by priority.
        self._priorities: Counter[int] = Counter()
        self._numbers = itertools.count()
        self._urgent: list[_Entry] = []
        self._later: list[_Entry] = []
        self._now = -math.inf
        # Requests of at most this first rank are among the most urgent.
        self._horizon = -math.inf

    def add(self, request: Request) -> None:
        """Adds a request not in the queue: new, or back from a slot with its old ``arrival``."""
        key = ("", 0) if self.by_arrival else (request.tenant, request.priority)
        if (found := self._classes.get(key)) is None:
            found = self._classes[key] = _Class(*key)
            self._priorities[found.priority] += 1
        found.add(request)
        self._now = max(self._now, request.arrival_s)
        if found.head is request:
            self._enter(found)

    def remove(self, request: Request) -> None:
        """Removes a request."""
        key = ("", 0) if self.by_arrival else (request.tenant, request.priority)
        found = self._classes[key]
        found.remove(request)
        if found.requests:
            return
        found.entry = None
        del self._classes[key]
        self._priorities[found.priority] -= 1
        if not self._priorities[found.priority]:
            del self._priorities[found.priority]
        self._sweep()

    def head(self, now: float) -> Request | None:
        """Returns the next request at ``now``, on the clock of ``Request.arrival_s``; None if none waits.

        Time does not run backwards: an earlier reading than the last counts as the last.
        """
        if not self._classes:
            return None
        self._now = max(now, self._now)
        most_urgent = min(self._priorities)
        self._horizon = most_urgent if self._ageing_s is None else most_urgent * self._ageing_s + self._now
        while self._later and self._later[0][0] <= self._horizon:
            self._surface(self._later)
        while True:
            key, arrival, _, found = entry = self._urgent[0]
            if found.entry is entry:
                head = found.head
                is_urgent = found.priority == most_urgent or self.rank(head)[0] <= self._horizon
                if is_urgent and (key, arrival) == (self.tenants[found.tenant], head.arrival):
                    return head
            self._surface(self._urgent)

    def rank(self, request: Request) -> tuple[float, int]:
        """Returns the place among running requests: the smallest runs first, the largest is preempted first.

        It does not change with time, so a request promoted to a slot by ageing keeps it against later
        arrivals.
        """
        if self.by_arrival:
            return (0.0, request.arrival)
        if self._ageing_s is None:
            return (request.priority, request.arrival)
        return (request.priority * self._ageing_s + request.arrival_s, request.arrival)

    def _enter(self, found: _Class) -> None:
        """Enters a class by its first request; its older entries become stale."""
        head = found.head
        rank, number = self.rank(head)[0], next(self._numbers)
        if rank <= self._horizon or found.priority == min(self._priorities):
            found.entry = (self.tenants[found.tenant], head.arrival, number, found)
            heapq.heappush(self._urgent, found.entry)
        else:
            found.entry = (rank, head.arrival, number, found)
            heapq.heappush(self._later, found.entry)
        self._sweep()

    def _surface(self, heap: list[_Entry]) -> None:
        """Moves the class of a heap's first entry to where it belongs now, unless the entry is stale."""
        entry = heapq.heappop(heap)
        if entry[3].entry is entry:
            self._enter(entry[3])

    def _sweep(self) -> None:
        """Drops stale heap entries once they are the majority."""
        if len(self._urgent) + len(self._later) > 2 * len(self._classes) + _MAX_STALE:
            for heap in (self._urgent, self._later):
                heap[:] = [entry for entry in heap if entry[3].entry is entry]
                heapq.heapify(heap)


class ArrivalOrder(PriorityFairOrder):
    """First come, first served, regardless of priority and tenant."""

    by_arrival = True
