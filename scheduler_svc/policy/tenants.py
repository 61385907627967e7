"""Tenants: their shares, the tokens served to each, and how much of each waits."""

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from typing import Final

from scheduler_svc.requests.request import Request

# Number of stale heap entries to tolerate before a rebuild.
_SLACK = 64

MAX_REQUESTS: Final = "max_num_queued_reqs"
MAX_TOKENS: Final = "max_num_queued_tokens"
"""vLLM's names for the limits of the queue."""


class Tenants:
    """Counts each tenant's waiting requests, and the tokens served to it divided by its weight.

    The tenant with the smallest counter is next: the Virtual Token Counter (Sheng et al., "Fairness in
    Serving Large Language Models", OSDI 2024). A tenant is active while its requests wait. On activation its
    counter is raised to the smallest active counter, so idling earns no credit; without an active tenant, to
    the counter of the last. Between two tenants with requests always waiting, the served tokens per weight
    differ by at most the tokens of their running requests.

    Invariants:
        1. The counter of an active tenant never falls. 2. The smallest active counter never falls, nor does
        the floor of new counters. 3. At most ``max_idle`` inactive tenants are remembered: the most recently
        served. A running tenant is charged every step and stays among them. A forgotten tenant counts as new.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, *, max_idle: int = 4096) -> None:
        """Starts with all counters equal and nothing waiting.

        Args:
            weights: weights other than 1; twice the weight earns twice the tokens.
            max_idle: number of inactive tenants to remember.

        Raises:
            ValueError: naming the tenant whose weight is not a positive number.
        """
        self._weights = dict(weights or {})
        for tenant, weight in self._weights.items():
            if not (weight > 0 and math.isfinite(weight)):
                raise ValueError(f"the weight of tenant {tenant!r} must be a positive number, not {weight}")
        self._max_idle = max_idle
        self.requests: Counter[str] = Counter()
        """Waiting requests by tenant, without zeros."""
        self._tokens: Counter[str] = Counter()
        self.num_requests = 0
        self.num_tokens = 0
        """Known tokens of the waiting requests."""
        # Counters of the active tenants, and of the others, the least recently charged first.
        self._active: dict[str, float] = {}
        self._idle: OrderedDict[str, float] = OrderedDict()
        # (counter when pushed, tenant): never above the tenant's counter, raised when they surface.
        self._heap: list[tuple[float, str]] = []
        self._floor = 0.0
        # The last active tenant; the floor follows its counter while no tenant is active.
        self._last: str | None = None

    # ---- waiting requests ----

    def add(self, request: Request) -> None:
        """Counts a request as waiting. Its tokens must not change meanwhile."""
        tenant = request.tenant
        if tenant not in self.requests:
            self._activate(tenant)
        self._count(tenant, 1, len(request.token_ids))

    def remove(self, request: Request) -> None:
        """Ends a request's wait."""
        tenant = request.tenant
        self._count(tenant, -1, -len(request.token_ids))
        if not self.requests[tenant]:
            del self.requests[tenant], self._tokens[tenant]
            self._deactivate(tenant)

    def _count(self, tenant: str, requests: int, tokens: int) -> None:
        self.requests[tenant] += requests
        self._tokens[tenant] += tokens
        self.num_requests += requests
        self.num_tokens += tokens

    def shares(self, others: Collection[str]) -> dict[str, float]:
        """Returns the shares of the waiting tenants and of `others`, by weight; they add up to 1."""
        weights = {tenant: self._weights.get(tenant, 1.0) for tenant in {*self.requests, *others}}
        total = sum(weights.values())
        return {tenant: weight / total for tenant, weight in weights.items()}

    def exceeds(
        self, tenant: str, count: int, num_tokens: int, max_requests: int, max_tokens: int
    ) -> str | None:
        """Returns the queue limit exceeded by further requests of a tenant; None if they fit.

        Up to half of a limit, all tenants may use the queue freely; beyond it, each may use its share among
        the waiting tenants. Half as much again is a reserve, shared in the same way. So a single tenant can
        fill the queue, but a flood never causes the first request of another tenant to be refused. An empty
        queue takes anything.
        """
        if not self.num_requests:
            return None
        for name, own, total, more, most in (
            (MAX_REQUESTS, self.requests[tenant], self.num_requests, count, max_requests),
            (MAX_TOKENS, self._tokens[tenant], self.num_tokens, num_tokens, max_tokens),
        ):
            after, mine = total + more, own + more
            limit = math.inf
            if after > most // 2:
                limit = self.shares((tenant,))[tenant] * (most if after <= most else most // 2)
            if after > most + max(1, most // 2) or (own and mine > limit):
                return name
        return None

    # ---- served tokens ----

    def __getitem__(self, tenant: str) -> float:
        """Returns a tenant's counter, in tokens per weight."""
        if (counter := self._active.get(tenant)) is not None:
            return counter
        return self._idle.get(tenant, self._floor)

    def charge(self, tenant: str, tokens: int) -> None:
        """Charges a tenant, active or not, for served tokens (not negative)."""
        served = tokens / self._weights.get(tenant, 1.0)
        if tenant in self._active:
            self._active[tenant] += served
            return
        counter = self._idle.get(tenant, self._floor) + served
        if tenant == self._last and not self._active:
            self._floor = max(self._floor, counter)
        self._keep(tenant, counter)

    def _activate(self, tenant: str) -> None:
        self._raise_floor()
        counter = max(self._idle.pop(tenant, self._floor), self._floor)
        self._active[tenant] = counter
        heapq.heappush(self._heap, (counter, tenant))
        if len(self._heap) > 2 * len(self._active) + _SLACK:
            self._heap = [(counter, tenant) for tenant, counter in self._active.items()]
            heapq.heapify(self._heap)

    def _deactivate(self, tenant: str) -> None:
        counter = self._active.pop(tenant)
        if not self._active:
            self._last = tenant
            self._floor = max(self._floor, counter)
            self._heap.clear()
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
