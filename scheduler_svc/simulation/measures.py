"""What the clients of a simulation see: times to first tokens, gaps, latencies, tokens and hits."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler_svc.requests.request import Event, Request


@dataclass(slots=True)
class _Live:
    """A request between its arrival and its end."""

    tenant: str
    arrival_s: float
    request: Request | None = None
    stamp: list[float] = field(default_factory=list)
    """Time of the last token, in a list that rows of a batch share as long as they stay together."""


@dataclass(slots=True)
class Tally:
    """Figures of one tenant."""

    ttft_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    gaps_us: Counter[int] = field(default_factory=Counter)
    """Times between two tokens of a request, microseconds, by how often they occurred."""
    tokens: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    rejected: int = 0

    def add(self, other: "Tally") -> None:
        """Adds the figures of another tenant."""
        self.ttft_s += other.ttft_s
        self.latency_s += other.latency_s
        self.gaps_us.update(other.gaps_us)
        self.tokens += other.tokens
        self.prompt_tokens += other.prompt_tokens
        self.hit_tokens += other.hit_tokens
        self.preemptions += other.preemptions
        self.rejected += other.rejected

    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """Returns values of each kind of time, seconds, with the share of values up to them."""
        shares = [percent / 100 for percent in range(1, 101)]
        times: dict[str, Counter[Any]] = {
            "ttft": Counter(self.ttft_s),
            "gap": self.gaps_us,
            "latency": Counter(self.latency_s),
        }
        return {
            name: [
                (value * (1e-6 if name == "gap" else 1), share)
                for value, share in zip(quantiles(values, shares), shares, strict=True)
            ]
            for name, values in times.items()
        }

    def figures(self, span_s: float) -> dict[str, Any]:
        """Returns the figures by name, given the seconds from the first arrival to the last end."""
        return {
            "requests": len(self.latency_s),
            "rejected": self.rejected,
            "ttft_s": summary(Counter(self.ttft_s)),
            "gap_s": {name: value * 1e-6 for name, value in summary(self.gaps_us).items()},
            "latency_s": summary(Counter(self.latency_s)),
            "tokens_per_s": self.tokens / span_s if span_s else 0.0,
            "prefix_hit_share": self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0,
            "preemptions": self.preemptions,
        }


class Measures:
    """Receives the events of all requests."""

    def __init__(self, clock: Callable[[], float], on_end: Callable[[str], None]) -> None:
        """Starts empty; ``on_end`` is called with the id of each request that ends."""
        self.tenants: defaultdict[str, Tally] = defaultdict(Tally)
        self.requests_by_replica: Counter[str] = Counter()
        self.failures: list[str] = []
        """Why requests failed that were accepted."""
        self.ended_s = 0.0
        self._clock = clock
        self._on_end = on_end
        self._live: dict[str, _Live] = {}
        # Batches by their first request: the ids, the shared stamp, and the rows of each tenant.
        self._batches: dict[
            str, tuple[Sequence[str], list[float], list[tuple[Counter[int], Tally, int]]]
        ] = {}

    def arrived(self, request_id: str, tenant: str, arrival_s: float) -> None:
        """Notes a request on its way to the scheduler."""
        self._live[request_id] = _Live(tenant, arrival_s)

    def accepted(self, request_id: str, request: Request | None) -> None:
        """Notes the scheduler's request; it has failed already if there is none."""
        if request is not None:
            self._live[request_id].request = request

    def rejected(self, request_id: str) -> None:
        """Notes a request that the scheduler refused, because its queue is full."""
        self.tenants[self._live.pop(request_id).tenant].rejected += 1
        self._on_end(request_id)

    def push(self, event: Event) -> None:
        """Takes an event of a request."""
        live = self._live[event.request_id]
        tally, now = self.tenants[live.tenant], self._clock()
        if event.first:
            self.requests_by_replica[event.replica_id] += 1
            tally.prompt_tokens += event.num_prompt_tokens
            tally.hit_tokens += event.num_cached_tokens
        if event.token_ids:
            tally.tokens += len(event.token_ids)
            if live.stamp:
                tally.gaps_us[round((now - live.stamp[0]) * 1e6)] += 1
            else:
                tally.ttft_s.append(now - live.arrival_s)
            live.stamp = [now]
        if event.finish_reason is not None or event.error is not None:
            del self._live[event.request_id]
            self._batches.pop(event.request_id, None)
            self.ended_s = now
            if live.request is not None:
                tally.preemptions += live.request.delivery.num_preemptions
            if event.error is None:
                tally.latency_s.append(now - live.arrival_s)
            else:
                self.failures.append(str(event.error))
            self._on_end(event.request_id)

    def push_tokens(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        """Takes a token, not the first, of each of several requests."""
        del token_ids
        now = self._clock()
        batch = self._batches.get(request_ids[0])
        # A step whose tokens came as events gave each request a stamp of its own.
        if (
            batch is None
            or self._live[request_ids[0]].stamp is not batch[1]
            or (batch[0] is not request_ids and batch[0] != request_ids)
        ):
            self._split(request_ids, now)
            return
        _, stamp, tenants = batch
        gap = round((now - stamp[0]) * 1e6)
        stamp[0] = now
        for gaps, tally, rows in tenants:
            gaps[gap] += rows
            tally.tokens += rows

    def _split(self, request_ids: Sequence[str], now: float) -> None:
        """Takes the tokens of a batch with other rows than the last."""
        # A row back from a missed step joins rows with later tokens than those of its old batch.
        left = {id(self._live[request_id].stamp) for request_id in request_ids}
        self._batches = {first: one for first, one in self._batches.items() if id(one[1]) not in left}
        stamp, rows = [now], Counter[str]()
        for request_id in request_ids:
            live = self._live[request_id]
            tally = self.tenants[live.tenant]
            tally.gaps_us[round((now - live.stamp[0]) * 1e6)] += 1
            tally.tokens += 1
            live.stamp = stamp
            rows[live.tenant] += 1
        tenants = [(self.tenants[name].gaps_us, self.tenants[name], count) for name, count in rows.items()]
        self._batches[request_ids[0]] = (list(request_ids), stamp, tenants)


def summary(values: Counter[Any]) -> dict[str, float]:
    """Returns mean and percentiles of values with their counts; zeros without any."""
    parts = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    found = dict(zip(parts, quantiles(values, list(parts.values())), strict=True))
    return found | {"mean": sum(one * count for one, count in values.items()) / (values.total() or 1)}


def quantiles(values: Counter[Any], shares: Sequence[float]) -> list[float]:
    """Returns the least value that reaches each share of all values, shares ascending; 0 without values."""
    total, below, value = values.total(), 0, 0.0
    ranked, result = iter(sorted(values.items())), []
    for share in shares:
        while below < share * total:
            value, count = next(ranked)
            below += count
        result.append(value)
    return result
