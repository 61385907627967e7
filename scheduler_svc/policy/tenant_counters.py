"""Virtual token counters: how much each tenant has been served, so that tenants take turns."""

import heapq
import math
from collections import OrderedDict
from collections.abc import Mapping

# Number of stale heap entries to tolerate before a rebuild.
_SLACK = 64


class TenantCounters:
    """Tokens served per tenant, divided by its weight; the tenant with the smallest counter is next.

    This is the Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).
    A tenant is active while it has requests waiting. When it becomes active, its counter is raised to the
    smallest active counter, so that idling earns no credit; if no tenant is active, to the counter of the
    tenant that was last. For two tenants that always have requests waiting, the served tokens per weight
    differ by at most what one step serves.

    Invariants:
        1. While a tenant is active, its counter never falls. 2. The smallest active counter never falls, nor
        does the floor to which counters are raised. 3. At most ``max_idle`` inactive tenants are remembered:
        the most recently served. A running tenant is charged every step and stays among them. A forgotten
        tenant starts like a new one.
    """

    def __init__(self, weights: Mapping[str, float], *, max_idle: int = 4096) -> None:
        """Starts with all counters equal.

        Args:
            weights: weights other than 1; a tenant of twice the weight gets twice the tokens.
            max_idle: number of inactive tenants to remember.

        Raises:
            ValueError: naming the tenant whose weight is not a positive number.
        """
        for tenant, weight in weights.items():
            if not (weight > 0 and math.isfinite(weight)):
                raise ValueError(f"the weight of tenant {tenant!r} must be a positive number, not {weight}")
        self._weights = dict(weights)
        self._max_idle = max_idle
        self._active: dict[str, float] = {}
        # Least recently charged first.
        self._idle: OrderedDict[str, float] = OrderedDict()
        # (counter when pushed, tenant): never above the tenant's counter, raised when they surface.
        self._heap: list[tuple[float, str]] = []
        self._floor = 0.0
        # The tenant that was active last; the floor follows its counter while no tenant is active.
        self._last: str | None = None

    def __getitem__(self, tenant: str) -> float:
        """Returns the counter of an active tenant, tokens per weight."""
        return self._active[tenant]

    def activate(self, tenant: str) -> None:
        """Marks an inactive tenant as active: it has a request waiting."""
        self._raise_floor()
        counter = max(self._idle.pop(tenant, self._floor), self._floor)
        self._active[tenant] = counter
        heapq.heappush(self._heap, (counter, tenant))
        if len(self._heap) > 2 * len(self._active) + _SLACK:
            self._heap = [(counter, tenant) for tenant, counter in self._active.items()]
            heapq.heapify(self._heap)

    def deactivate(self, tenant: str) -> None:
        """Marks an active tenant as inactive: it has no more requests waiting."""
        counter = self._active.pop(tenant)
        if not self._active:
            self._last = tenant
            self._floor = max(self._floor, counter)
            self._heap.clear()
        self._keep(tenant, counter)

    def charge(self, tenant: str, tokens: int) -> None:
        """Charges a tenant, active or not, for ``tokens`` served tokens (not negative)."""
        served = tokens / self._weights.get(tenant, 1.0)
        if tenant in self._active:
            self._active[tenant] += served
            return
        counter = self._idle.get(tenant, self._floor) + served
        if tenant == self._last and not self._active:
            self._floor = max(self._floor, counter)
        self._keep(tenant, counter)

    def _keep(self, tenant: str, counter: float) -> None:
        self._idle[tenant] = counter
        self._idle.move_to_end(tenant)
        if len(self._idle) > self._max_idle:
            self._idle.popitem(last=False)

    def _raise_floor(self) -> None:
        """Raises the floor to the smallest counter of the active tenants."""
        while self._heap:
            pushed, tenant = self._heap[0]
            counter = self._active.get(tenant)
            if counter is None:
                heapq.heappop(self._heap)
            elif counter > pushed:
                heapq.heapreplace(self._heap, (counter, tenant))
            else:
                self._floor = max(self._floor, counter)
                return
