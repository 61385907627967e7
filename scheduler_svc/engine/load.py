"""The load and the counters of an engine, for clients' load balancing and `/metrics`."""

import copy
from dataclasses import dataclass, field
from typing import Final

from protos.triptych.v1.worker_pb2 import WorkerReport
from scheduler_svc.replica.pooling import PoolScheduler
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.replica.stats import STEP_TOKENS, BucketStats, Distribution, SchedulerStats


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The load of a replica."""

    replica_id: str
    num_running: int = 0
    """Requests with a slot."""
    kv_usage: float = 0.0
    """Share of KV blocks in use in the fullest group, 0 to 1."""
    starting: str | None = None
    """Last progress message before the replica is ready; None afterwards."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a deployment."""

    replicas: tuple[ReplicaLoad, ...] = ()
    num_waiting: int = 0
    """Requests without a slot, including deferred requests."""
    num_deferred: int = 0
    """Requests waiting for a grammar or a shared prefix rather than for capacity."""
    num_waiting_tokens: int = 0
    """Tokens to prefill for requests without a slot."""

    @property
    def num_running(self) -> int:
        """Requests with a slot, over all replicas."""
        return sum(replica.num_running for replica in self.replicas)

    @property
    def kv_usage(self) -> float:
        """The mean KV usage of the ready replicas."""
        ready = [replica.kv_usage for replica in self.replicas if replica.starting is None]
        return sum(ready) / max(1, len(ready))


PREEMPTION_REASONS: Final = ("memory", "priority", "share", "fault")


@dataclass(slots=True)
class Totals:
    """Monotonic figures of a replica, or sums over several replicas."""

    counts: dict[tuple[str, ...], float] = field(default_factory=dict)
    """Counters by metric name followed by the values of the metric's own labels."""
    distributions: dict[tuple[str, ...], Distribution] = field(default_factory=dict)
    """Histograms, keyed likewise."""
    longest_stall_s: float = 0.0
    """Longest wait of decoding requests for prefill steps."""
    report: WorkerReport = field(default_factory=WorkerReport)
    """Last report of the replica's worker; sums contain none."""

    def add(self, other: "Totals") -> None:
        """Adds the figures of `other`."""
        for key, value in other.counts.items():
            self.counts[key] = self.counts.get(key, 0) + value
        for key, distribution in other.distributions.items():
            mine = self.distributions.get(key)
            if mine is None:
                self.distributions[key] = copy.copy(distribution)
            else:
                mine.add(distribution)
        self.longest_stall_s = max(self.longest_stall_s, other.longest_stall_s)


def totals_of(scheduler: ReplicaScheduler | PoolScheduler) -> Totals:
    """Returns the current counters of a replica."""
    return _pool_totals(scheduler) if isinstance(scheduler, PoolScheduler) else _totals(scheduler)


def _pool_totals(scheduler: PoolScheduler) -> Totals:
    stats = scheduler.stats
    counts: dict[tuple[str, ...], float] = {
        ("vllm:prompt_tokens",): stats.tokens.total(),
        ("triptych:late_graphs",): stats.report.late_graphs,
        ("triptych:not_finite_requests",): stats.not_finite,
    }
    for shape, batches in stats.batches.items():
        name = str(shape)
        rows, tokens = stats.rows[shape], stats.tokens[shape]
        counts["triptych:pool_batches", name] = batches
        counts["triptych:pool_rows", name] = rows
        counts["triptych:pool_padding_rows", name] = 0 if shape.packed else batches * shape.batch - rows
        counts["triptych:pool_tokens", name] = tokens
        counts["triptych:pool_padding_tokens", name] = batches * shape.num_tokens - tokens
    times: dict[tuple[str, ...], Distribution] = {
        ("triptych:step_seconds", "pool", str(shape)): seconds for shape, seconds in stats.seconds.items()
    }
    return Totals(counts, {("vllm:request_queue_time_seconds",): stats.queue_s, **times}, report=stats.report)


def _totals(scheduler: ReplicaScheduler) -> Totals:
    stats, kv, shapes = scheduler.stats, scheduler.kv, scheduler.shapes
    counts: dict[tuple[str, ...], float] = {
        ("vllm:prefix_cache_queries",): kv.stats.queried_tokens,
        ("vllm:prefix_cache_hits",): kv.stats.hit_tokens,
        ("vllm:prompt_tokens_cached_by_source", "device"): kv.stats.hit_tokens,
        ("vllm:prompt_tokens",): stats.prompt_tokens,
        ("vllm:prompt_tokens_cached",): stats.cached_prompt_tokens,
        ("vllm:prompt_tokens_by_source", "local_compute"): stats.prompt_tokens - stats.cached_prompt_tokens,
        ("vllm:prompt_tokens_by_source", "local_cache_hit"): stats.cached_prompt_tokens,
        ("vllm:generation_tokens",): stats.generated_tokens,
        ("vllm:num_preemptions",): stats.preemptions.total(),
        ("triptych:deferred_requests",): stats.deferred,
        ("triptych:forked_sequences",): stats.forks,
        ("triptych:forced_tokens",): stats.forced_tokens,
        ("triptych:not_finite_requests",): stats.not_finite,
        ("triptych:plans",): stats.plans,
        ("triptych:plans_ahead",): stats.plans_ahead,
        ("triptych:stall_seconds",): stats.stall_s,
        ("triptych:late_graphs",): stats.report.late_graphs,
        ("triptych:grammar_seconds",): stats.report.grammar_us * 1e-6,
        ("triptych:block_copies",): kv.stats.copies,
        ("triptych:windows_kept",): kv.stats.kept_windows,
        ("triptych:kv_blocks_evicted",): kv.num_evicted,
        ("triptych:lora_loads",): scheduler.adapters.num_loads,
        ("triptych:lora_evictions",): scheduler.adapters.num_displaced,
        ("triptych:lora_placements",): stats.report.adapter_placements,
    }
    for reason in PREEMPTION_REASONS:
        counts["triptych:preemptions", reason] = stats.preemptions[reason]
    for buckets, runs, names in (
        (
            shapes.chunk_sizes,
            stats.prefills,
            ("prefill_chunks", "prefill_tokens", "prefill_padding_tokens"),
        ),
        (shapes.buckets, stats.buckets, ("decode_steps", "decode_rows", "decode_padding_rows")),
    ):
        for bucket in buckets:
            run = runs.get(bucket, BucketStats())
            values = (run.steps, run.rows, run.steps * bucket - run.rows)
            counts |= {
                (f"triptych:{name}", str(bucket)): value for name, value in zip(names, values, strict=True)
            }
    return Totals(counts, _distributions(stats), stats.longest_stall_s, stats.report)


def _distributions(stats: SchedulerStats) -> dict[tuple[str, ...], Distribution]:
    step_tokens = Distribution(STEP_TOKENS)
    step_tokens.add(stats.chunk_tokens)
    for rows, steps in stats.step_rows.items():
        step_tokens.observe(rows, steps)
    found: dict[tuple[str, ...], Distribution] = {
        ("vllm:iteration_tokens_total",): step_tokens,
        ("vllm:request_queue_time_seconds",): stats.queue_s,
        ("vllm:request_prefill_time_seconds",): stats.prefill_s,
        ("vllm:request_decode_time_seconds",): stats.decode_s,
        ("vllm:request_inference_time_seconds",): stats.inference_s,
        ("vllm:request_num_preemptions",): stats.request_preemptions,
        ("vllm:request_prefill_kv_computed_tokens",): stats.computed_tokens,
        ("triptych:grammar_compile_seconds",): stats.grammar_compile_s,
    }
    for kind, runs in (("prefill", stats.prefills), ("decode", stats.buckets)):
        for bucket, run in runs.items():
            found["triptych:step_seconds", kind, str(bucket)] = run.seconds
    return found
