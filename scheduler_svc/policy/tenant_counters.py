"""How much each tenant has been served: the virtual token counters that make tenants take turns."""

import heapq
import math
from collections import OrderedDict
from collections.abc import Mapping

# Stale heap entries that are not worth a rebuild.
_SLACK = 64


class TenantCounters:
    """Tokens served per tenant, divided by its weight; whoever has the smallest counter is next.

    This is the Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). A tenant is active while it
    has requests waiting. One that becomes active is lifted to the smallest counter of the active ones, so that idling earns no credit;
    if none is active, to the counter of the tenant that was last. Between two tenants that keep requests waiting, the served tokens per
    weight differ by no more than what one step serves.

    Invariants:
        1. While a tenant is active its counter never falls.
        2. The smallest active counter never falls; nor does what a tenant is lifted to.
        3. At most ``max_idle`` tenants that are not active are remembered: those that were served last. A tenant that runs is
           charged every step and so stays among them. A forgotten one begins where a new one does.
    """

    def __init__(self, weights: Mapping[str, float], *, max_idle: int = 4096) -> None:
        """Starts with all tenants equal.

        Args:
            weights: shares of the tenants that have another one than 1; twice the weight gets twice the tokens.
            max_idle: tenants without waiting requests whose counters are kept.

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
        # Whose counter the floor follows while nobody is active.
        self._last: str | None = None

    def __getitem__(self, tenant: str) -> float:
        """The counter of an active tenant, tokens per weight."""
        return self._active[tenant]

    def activate(self, tenant: str) -> None:
        """The tenant, which has not been active, has a request waiting."""
        self._raise_floor()
        counter = max(self._idle.pop(tenant, self._floor), self._floor)
        self._active[tenant] = counter
        heapq.heappush(self._heap, (counter, tenant))
        if len(self._heap) > 2 * len(self._active) + _SLACK:
            self._heap = [(counter, tenant) for tenant, counter in self._active.items()]
            heapq.heapify(self._heap)

    def deactivate(self, tenant: str) -> None:
        """The tenant, which has been active, has no request waiting any more."""
        counter = self._active.pop(tenant)
        if not self._active:
            self._last = tenant
            self._floor = max(self._floor, counter)
            self._heap.clear()
        self._keep(tenant, counter)

    def deactivate_all(self) -> None:
        """Nothing waits any more, and nobody was last: tenants that come back, the least served first, have what they had."""
        self._raise_floor()
        for tenant, counter in self._active.items():
            self._keep(tenant, counter)
        self._active.clear()
        self._heap.clear()
        self._last = None

    def charge(self, tenant: str, tokens: int) -> None:
        """The tenant, active or not, was served that many tokens (not negative)."""
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
        """Brings the floor up to the smallest counter of the active tenants."""
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
