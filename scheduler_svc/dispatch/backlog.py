"""How much waits, by tenant, and each tenant's share of a full queue."""

from collections import Counter

from scheduler_svc.requests.request import Request


class Backlog:
    """Counts the requests of some queues and their tokens, which must not change while they wait."""

    def __init__(self) -> None:
        """Starts empty."""
        self.requests: Counter[str] = Counter()
        """Waiting requests by tenant; a tenant without any has no entry."""
        self._tokens: Counter[str] = Counter()
        self.num_requests = 0
        self.num_tokens = 0
        """Tokens that the requests have to prefill."""

    def add(self, request: Request) -> None:
        """Counts a request that starts to wait."""
        self._count(request.tenant, 1, len(request.token_ids))

    def remove(self, request: Request) -> None:
        """Ends its wait."""
        self._count(request.tenant, -1, -len(request.token_ids))

    def _count(self, tenant: str, requests: int, tokens: int) -> None:
        self.requests[tenant] += requests
        self._tokens[tenant] += tokens
        self.num_requests += requests
        self.num_tokens += tokens
        if not self.requests[tenant]:
            del self.requests[tenant], self._tokens[tenant]

    def has_share(self, tenant: str, count: int, num_tokens: int, max_waiting: int, max_tokens: int) -> bool:
        """Returns whether a full queue still takes requests of a tenant, given the queue's bounds.

        Half as much again is a reserve, of which each waiting tenant has an equal share. One tenant's flood
        fills the queue, but takes no other tenant's share.
        """
        num_tenants = len(self.requests) + (tenant not in self.requests)
        reserve, reserve_tokens = max(1, max_waiting // 2), max_tokens // 2
        return (
            self.requests[tenant] + count <= max(1, reserve // num_tenants)
            and self._tokens[tenant] + num_tokens <= reserve_tokens // num_tenants
            and self.num_requests + count <= max_waiting + reserve
            and self.num_tokens + num_tokens <= max_tokens + reserve_tokens
        )
