"""Counters of a replica, under the names that `/metrics` shows."""

import copy
from dataclasses import dataclass, field
from typing import Final

from protos.triptych.v1.worker_pb2 import WorkerReport
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.replica.stats import STEP_TOKENS, Distribution, SchedulerStats

PREEMPTION_REASONS: Final = ("memory", "priority", "fault")


@dataclass(slots=True)
class Totals:
    """Monotonic figures of one replica, or sums over several replicas."""

    counts: dict[tuple[str, ...], float] = field(default_factory=dict)
    """Counters by metric name followed by the values of the metric's own labels."""
    distributions: dict[tuple[str, ...], Distribution] = field(default_factory=dict)
    """Histograms in the same way."""
    longest_stall_s: float = 0.0
    """The longest time that decoding requests waited for prefill steps."""
    report: WorkerReport = field(default_factory=WorkerReport)
    """The last report of the replica's worker, which no sum has."""

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


def totals_of(scheduler: ReplicaScheduler) -> Totals:
    """Returns the current counters of a generating replica."""
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
        ("triptych:prefill_chunks",): stats.chunks,
        ("triptych:prefill_tokens",): stats.prefill_tokens,
        ("triptych:prefill_padding_tokens",): stats.chunks * shapes.chunk - stats.prefill_tokens,
        ("triptych:forced_tokens",): stats.forced_tokens,
        ("triptych:plans",): stats.plans,
        ("triptych:plans_ahead",): stats.plans_ahead,
        ("triptych:stall_seconds",): stats.stall_s,
        ("triptych:late_graphs",): stats.report.late_graphs,
        ("triptych:grammar_seconds",): stats.report.grammar_us * 1e-6,
        ("triptych:block_copies",): kv.stats.copies,
        ("triptych:windows_kept",): kv.stats.kept_windows,
        ("triptych:kv_blocks_evicted",): kv.num_evicted,
        ("triptych:lora_loads",): stats.adapter_loads,
        ("triptych:lora_evictions",): stats.adapter_evictions,
        ("triptych:lora_placements",): stats.adapter_placements,
    }
    for reason in PREEMPTION_REASONS:
        counts["triptych:preemptions", reason] = stats.preemptions[reason]
    for bucket in shapes.buckets:
        run = stats.buckets.get(bucket)
        steps, rows = (run.steps, run.rows) if run else (0, 0)
        counts["triptych:decode_steps", str(bucket)] = steps
        counts["triptych:decode_rows", str(bucket)] = rows
        counts["triptych:decode_padding_rows", str(bucket)] = steps * bucket - rows
    return Totals(counts, _distributions(stats, shapes.chunk), stats.longest_stall_s, stats.report)


def _distributions(stats: SchedulerStats, chunk: int) -> dict[tuple[str, ...], Distribution]:
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
        ("triptych:step_seconds", "prefill", str(chunk)): stats.chunk_seconds,
    }
    for bucket, run in stats.buckets.items():
        found["triptych:step_seconds", "decode", str(bucket)] = run.seconds
    return found
