"""The scheduler's metrics, under vLLM's names where vLLM has them. docs/metrics.md lists them.

Nothing is kept for them while steps run but plain counters; they become metrics when somebody asks. What the gateway measures (latencies,
tokens and ends of requests as clients see them) is not repeated here.
"""

import asyncio
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler_svc.dispatch.engine import Engine
from scheduler_svc.kv.cache import KvCache
from scheduler_svc.pooling.scheduler import PoolScheduler
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.replica.stats import STEP_TOKENS, Distribution
from scheduler_svc.workers.deployment import Deployment

# Replicas that left and still have counters of their own.
_MAX_GONE: Final = 16

# The engine under which those that left before them are added up.
RETIRED: Final = "retired"

# Rows of decode steps; a scheduler has at most 4096 slots.
_BATCH_SIZES: Final = tuple(2**n for n in range(13))

_PREEMPTIONS: Final = ("memory", "priority", "fault")


class _Family(NamedTuple):
    """One metric by replica: its name, its meaning, and its labels beside the model and the replica."""

    name: str
    text: str
    labels: tuple[str, ...] = ()


_COUNTERS: Final = (
    _Family("vllm:prefix_cache_queries", "Tokens of admitted requests."),
    _Family("vllm:prefix_cache_hits", "Tokens of admitted requests that were in the prefix cache."),
    _Family("vllm:num_preemptions", "Requests that gave up their slot."),
    _Family("triptych:preemptions", "The same by reason.", ("reason",)),
    _Family("triptych:deferred_requests", "Requests that waited for a prefix that another one computed."),
    _Family(
        "triptych:forked_sequences",
        "Sequences that shared the prompt that another one of their request computed.",
    ),
    _Family("triptych:prefill_chunks", "Prefill steps."),
    _Family("triptych:prefill_tokens", "Tokens in prefill steps."),
    _Family("triptych:prefill_padding_tokens", "Padding in prefill steps."),
    _Family("triptych:decode_steps", "Decode steps by compiled batch size.", ("bucket",)),
    _Family("triptych:decode_rows", "Rows of decode steps that were requests.", ("bucket",)),
    _Family("triptych:decode_padding_rows", "Rows of decode steps that were padding.", ("bucket",)),
    _Family(
        "triptych:forced_tokens", "Tokens that grammars left no choice about, emitted without a forward pass."
    ),
    _Family("triptych:generated_tokens", "Tokens sampled, for gateways and direct clients."),
    _Family("triptych:stall_seconds", "Time that decoding requests stood still for prefill steps."),
    _Family("triptych:block_copies", "KV blocks copied."),
    _Family("triptych:windows_kept", "Copies that keep a sliding window for later requests."),
    _Family("triptych:kv_blocks_evicted", "Cached KV blocks given up for other content."),
    _Family("triptych:pool_batches", "Batches of a pooling model by shape (rows x tokens).", ("shape",)),
    _Family("triptych:pool_rows", "Rows of them that were requests.", ("shape",)),
    _Family("triptych:pool_padding_rows", "Rows of them that were padding.", ("shape",)),
    _Family("triptych:pool_tokens", "Prompt tokens in them.", ("shape",)),
    _Family("triptych:pool_padding_tokens", "Padding in them, that of rows included.", ("shape",)),
)

_PHASES: Final = (
    _Family("vllm:request_queue_time_seconds", "Arrival to first slot, by request."),
    _Family("vllm:request_prefill_time_seconds", "First slot to first token, by request."),
    _Family("vllm:request_decode_time_seconds", "First token to last token, by request."),
)


@dataclass(slots=True)
class _Totals:
    """What only grows, of one or several lives of replicas.

    Attributes:
        counts: by metric and values of its own labels.
        phases: by metric.
        chunk_tokens: tokens of prefill steps.
        longest_stall_s: seconds.
    """

    counts: dict[tuple[str, ...], float] = field(default_factory=dict)
    phases: dict[str, Distribution] = field(
        default_factory=lambda: {family.name: Distribution() for family in _PHASES}
    )
    chunk_tokens: Distribution = field(default_factory=lambda: Distribution(STEP_TOKENS))
    longest_stall_s: float = 0.0

    def add(self, other: "_Totals") -> None:
        """Adds another one's."""
        for key, value in other.counts.items():
            self.counts[key] = self.counts.get(key, 0) + value
        for name, phase in other.phases.items():
            self.phases[name].add(phase)
        self.chunk_tokens.add(other.chunk_tokens)
        self.longest_stall_s = max(self.longest_stall_s, other.longest_stall_s)

    @classmethod
    def of(cls, scheduler: ReplicaScheduler | PoolScheduler) -> "_Totals":
        """A replica's present ones."""
        if isinstance(scheduler, PoolScheduler):
            return cls._of_pooling(scheduler)
        stats, kv, geometry = scheduler.stats, scheduler.kv, scheduler.geometry
        counts: dict[tuple[str, ...], float] = {
            ("vllm:prefix_cache_queries",): kv.stats.queried_tokens,
            ("vllm:prefix_cache_hits",): kv.stats.hit_tokens,
            ("vllm:num_preemptions",): stats.preemptions.total(),
            ("triptych:deferred_requests",): stats.deferred,
            ("triptych:forked_sequences",): stats.forks,
            ("triptych:prefill_chunks",): stats.chunks,
            ("triptych:prefill_tokens",): stats.prefill_tokens,
            ("triptych:prefill_padding_tokens",): stats.chunks * geometry.chunk - stats.prefill_tokens,
            ("triptych:forced_tokens",): stats.forced_tokens,
            ("triptych:generated_tokens",): stats.generated_tokens,
            ("triptych:stall_seconds",): stats.stall_s,
            ("triptych:block_copies",): kv.stats.copies,
            ("triptych:windows_kept",): kv.stats.kept_windows,
            ("triptych:kv_blocks_evicted",): kv.num_evicted,
        }
        for reason in _PREEMPTIONS:
            counts["triptych:preemptions", reason] = stats.preemptions[reason]
        for bucket in geometry.buckets:
            run = stats.buckets.get(bucket)
            steps, rows = (run.steps, run.rows) if run else (0, 0)
            counts["triptych:decode_steps", str(bucket)] = steps
            counts["triptych:decode_rows", str(bucket)] = rows
            counts["triptych:decode_padding_rows", str(bucket)] = steps * bucket - rows
        totals = cls(counts, longest_stall_s=stats.longest_stall_s)
        for family, phase in zip(_PHASES, (stats.queue_s, stats.prefill_s, stats.decode_s), strict=True):
            totals.phases[family.name].add(phase)
        totals.chunk_tokens.add(stats.chunk_tokens)
        return totals

    @classmethod
    def _of_pooling(cls, scheduler: PoolScheduler) -> "_Totals":
        stats = scheduler.stats
        counts: dict[tuple[str, ...], float] = {}
        for shape, batches in stats.batches.items():
            name = f"{shape.batch}x{shape.prompt_len}"
            rows, tokens = stats.rows[shape], stats.tokens[shape]
            counts["triptych:pool_batches", name] = batches
            counts["triptych:pool_rows", name] = rows
            counts["triptych:pool_padding_rows", name] = batches * shape.batch - rows
            counts["triptych:pool_tokens", name] = tokens
            counts["triptych:pool_padding_tokens", name] = batches * shape.batch * shape.prompt_len - tokens
        return cls(counts)


class _Collected(Collector):
    """Metrics that were read before."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


class SchedulerMetrics(Collector):
    """A deployment's measurements.

    Counters outlive their replica, or sums over replicas would fall when one leaves: they stay where they were, go on if it comes back,
    and are added up under the engine "retired" once many others have left after it.
    """

    def __init__(self, engine: Engine, deployment: Deployment) -> None:
        """Measures ``engine``, and follows which replicas leave ``deployment``."""
        self._engine = engine
        self._deployment = deployment
        self._gone: dict[str, _Totals] = {}
        self._retired = _Totals()
        deployment.on_detach(self._keep)

    async def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        # Read here, at one time; written elsewhere: the text of many replicas takes longer than a step.
        return await asyncio.to_thread(generate_latest, _Collected(list(self.collect())))

    def collect(self) -> Iterator[Metric]:
        """The metrics of now; before a model is served, only what does not speak of it."""
        replicas = GaugeMetricFamily("triptych:replicas", "Replicas by state.", labels=("state",))
        replicas.add_metric(("ready",), len(self._live))
        replicas.add_metric(("configuring",), len(self._deployment.starting))
        yield replicas
        served = self._deployment.served
        if served is None:
            return
        model = served.info.served_name
        totals = self._totals()
        yield from self._requests(model)
        yield from self._memory(model)
        yield from _by_replica(model, totals)
        yield from self._steps(model, totals.values())

    @property
    def _live(self) -> dict[str, ReplicaScheduler | PoolScheduler]:
        """The schedulers of ready replicas."""
        live: dict[str, ReplicaScheduler | PoolScheduler] = {}
        live.update((name, replica.scheduler) for name, replica in self._engine.replicas.items())
        live.update((name, replica.scheduler) for name, replica in self._deployment.pool.replicas.items())
        return live

    def _keep(self, replica_id: str, scheduler: ReplicaScheduler | PoolScheduler) -> None:
        """A replica is gone: its counters stay."""
        totals = self._gone.pop(replica_id, _Totals())
        totals.add(_Totals.of(scheduler))
        # The last one to leave is the last one in the dict.
        self._gone[replica_id] = totals
        live = self._live
        away = [name for name in self._gone if name == replica_id or name not in live]
        for name in away[: max(0, len(away) - _MAX_GONE)]:
            self._retired.add(self._gone.pop(name))

    def _totals(self) -> dict[str, _Totals]:
        """By replica, over all of its lives."""
        totals: dict[str, _Totals] = {}
        kept = [*self._gone.items(), (RETIRED, self._retired)] if self._retired.counts else self._gone.items()
        live = ((name, _Totals.of(scheduler)) for name, scheduler in self._live.items())
        for name, one in itertools.chain(kept, live):
            totals.setdefault(name, _Totals()).add(one)
        return totals

    def _requests(self, model: str) -> Iterator[Metric]:
        engine, pool = self._engine, self._deployment.pool
        running = _gauge("vllm:num_requests_running", "Requests that have a slot.", "engine")
        for name, scheduler in self._live.items():
            running.add_metric((model, name), scheduler.num_running)
        yield running
        # The queue belongs to no replica.
        waiting = _gauge("vllm:num_requests_waiting", "Requests without a slot.")
        waiting.add_metric((model,), engine.num_waiting + pool.num_waiting)
        yield waiting
        reasons = _gauge("vllm:num_requests_waiting_by_reason", "The same by what they wait for.", "reason")
        reasons.add_metric((model, "capacity"), len(engine.waiting) + pool.num_waiting)
        reasons.add_metric((model, "deferred"), engine.num_waiting - len(engine.waiting))
        yield reasons
        tokens = _gauge("triptych:waiting_tokens", "Tokens of requests that wait for a slot.")
        tokens.add_metric((model,), engine.waiting.num_tokens + pool.num_waiting_tokens)
        yield tokens

    def _memory(self, model: str) -> Iterator[Metric]:
        usage = _gauge(
            "vllm:kv_cache_usage_perc", "Share of KV blocks in use in the fullest group, 0 to 1.", "engine"
        )
        blocks = _gauge("triptych:kv_blocks", "KV blocks in use, and free ones.", "engine", "group", "state")
        prefixes = _gauge("triptych:cached_prefixes", "Prefixes that can be found.", "engine", "group")
        pins = _gauge("triptych:pinned_prefixes", "Prefixes that are kept for a time.", "engine")
        for name, replica in self._engine.replicas.items():
            kv: KvCache = replica.scheduler.kv
            usage.add_metric((model, name), kv.usage)
            pins.add_metric((model, name), self._engine.pinned.count(name))
            for group_id, group in enumerate(kv.groups):
                pool, labels = group.pool, (model, name, str(group_id))
                blocks.add_metric((*labels, "used"), pool.num_blocks - pool.num_free)
                blocks.add_metric((*labels, "free"), pool.num_free)
                prefixes.add_metric(labels, pool.num_cached)
        yield from (usage, blocks, prefixes, pins)

    def _steps(self, model: str, totals: Iterable[_Totals]) -> Iterator[Metric]:
        """What is counted over all replicas together."""
        rows, tokens = Distribution(_BATCH_SIZES), Distribution(STEP_TOKENS)
        for size, steps in self._deployment.histogram.counts_since_start.items():
            rows.observe(size, steps)
            tokens.observe(size, steps)
        for one in totals:
            tokens.add(one.chunk_tokens)
        for name, text, values in (
            ("triptych:batch_size", "Requests in a decode step, before padding.", rows),
            ("vllm:iteration_tokens_total", "Tokens of a step, prefill or decode, before padding.", tokens),
        ):
            histogram = HistogramMetricFamily(name, text, labels=("model_name",))
            _add(histogram, (model,), values)
            yield histogram


def _by_replica(model: str, totals: dict[str, _Totals]) -> Iterator[Metric]:
    counters = {
        family.name: CounterMetricFamily(
            family.name, family.text, labels=("model_name", "engine", *family.labels)
        )
        for family in _COUNTERS
    }
    for name, one in totals.items():
        for (metric, *labels), value in one.counts.items():
            counters[metric].add_metric((model, name, *labels), value)
    yield from counters.values()
    for family in _PHASES:
        histogram = HistogramMetricFamily(family.name, family.text, labels=("model_name", "engine"))
        for name, one in totals.items():
            _add(histogram, (model, name), one.phases[family.name])
        yield histogram
    stall = _gauge("triptych:longest_stall_seconds", "The longest of these stalls since the start.", "engine")
    for name, one in totals.items():
        stall.add_metric((model, name), one.longest_stall_s)
    yield stall


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=("model_name", *labels))


def _add(histogram: HistogramMetricFamily, labels: tuple[str, ...], values: Distribution) -> None:
    bounds = [*(str(float(bound)) for bound in values.bounds), "+Inf"]
    cumulated = itertools.accumulate(values.counts)
    histogram.add_metric(labels, list(zip(bounds, cumulated, strict=True)), values.total)
