"""Counters of a replica, under the names that `/metrics` shows."""

from dataclasses import dataclass, field
from typing import Final

from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.replica.stats import STEP_TOKENS, Distribution

PREEMPTION_REASONS: Final = ("memory", "priority", "fault")

QUEUE_TIME: Final = "vllm:request_queue_time_seconds"
PREFILL_TIME: Final = "vllm:request_prefill_time_seconds"
DECODE_TIME: Final = "vllm:request_decode_time_seconds"


@dataclass(slots=True)
class Totals:
    """Monotonic figures of one replica, or sums over several replicas."""

    counts: dict[tuple[str, ...], float] = field(default_factory=dict)
    """Counters by metric name followed by the values of the metric's own labels."""
    phases: dict[str, Distribution] = field(
        default_factory=lambda: {name: Distribution() for name in (QUEUE_TIME, PREFILL_TIME, DECODE_TIME)}
    )
    """Durations of request phases by metric name, seconds."""
    chunk_tokens: Distribution = field(default_factory=lambda: Distribution(STEP_TOKENS))
    """Tokens of each prefill step, without padding."""
    longest_stall_s: float = 0.0
    """The longest time that decoding requests waited for prefill steps."""

    def add(self, other: "Totals") -> None:
        """Adds the figures of `other`."""
        for key, value in other.counts.items():
            self.counts[key] = self.counts.get(key, 0) + value
        for name, phase in other.phases.items():
            self.phases[name].add(phase)
        self.chunk_tokens.add(other.chunk_tokens)
        self.longest_stall_s = max(self.longest_stall_s, other.longest_stall_s)


def totals_of(scheduler: ReplicaScheduler) -> Totals:
    """Returns the current counters of a generating replica."""
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
        ("triptych:lora_loads",): stats.adapter_loads,
        ("triptych:lora_evictions",): stats.adapter_evictions,
        ("triptych:lora_placements",): stats.adapter_placements,
    }
    for reason in PREEMPTION_REASONS:
        counts["triptych:preemptions", reason] = stats.preemptions[reason]
    for bucket in geometry.buckets:
        run = stats.buckets.get(bucket)
        steps, rows = (run.steps, run.rows) if run else (0, 0)
        counts["triptych:decode_steps", str(bucket)] = steps
        counts["triptych:decode_rows", str(bucket)] = rows
        counts["triptych:decode_padding_rows", str(bucket)] = steps * bucket - rows
    totals = Totals(counts, longest_stall_s=stats.longest_stall_s)
    totals.phases[QUEUE_TIME].add(stats.queue_s)
    totals.phases[PREFILL_TIME].add(stats.prefill_s)
    totals.phases[DECODE_TIME].add(stats.decode_s)
    totals.chunk_tokens.add(stats.chunk_tokens)
    return totals
