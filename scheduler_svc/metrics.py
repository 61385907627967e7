"""The scheduler's metrics, under vLLM's names where they exist. docs/metrics.md lists them.

Steps only increment plain counters, which become metrics at each scrape. The gateway measures what clients
see (latencies, tokens, finish reasons); that is not repeated here.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, TypeVar

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from protos.errors import TriptychError
from protos.service.backpressure import UnreadLimits
from protos.service.certificate_metrics import CertificateDays
from scheduler_svc.engine.load import Load, Totals
from scheduler_svc.engine.request_timeouts import Timeout
from scheduler_svc.kv.cache import KvCache
from scheduler_svc.policy.tenants import MAX_REQUESTS, MAX_TOKENS
from scheduler_svc.replica.quarantine import Loss
from scheduler_svc.replica.stats import REQUEST_TOKENS, Distribution
from scheduler_svc.workers.deployment import Deployment
from scheduler_svc.workers.losses import Losses
from scheduler_svc.workers.progress import Stall

# Most lost replicas with counters of their own.
_MAX_GONE: Final = 16

# The `engine` label of the sum over earlier lost replicas.
RETIRED: Final = "retired"

# Rows of decode steps; a scheduler has at most 4096 slots.
_BATCH_SIZES: Final = tuple(2**n for n in range(13))


# The labels of all metrics of a replica.
_REPLICA: Final = ("model_name", "engine")

_Samples = dict[tuple[str, ...], float]
_Labels = TypeVar("_Labels", bound=tuple[str, ...])


# Metrics of each replica: name, text, and labels in addition to `_REPLICA`.
_COUNTERS: Final[Mapping[str, tuple[str, ...]]] = {
    "vllm:prefix_cache_queries": ("Tokens of admitted requests.",),
    "vllm:prefix_cache_hits": ("Tokens of admitted requests that the prefix cache had.",),
    "vllm:prompt_tokens": ("Prompt tokens of requests that began to answer.",),
    "vllm:prompt_tokens_by_source": ("Prompt tokens by how they were processed.", "source"),
    "vllm:prompt_tokens_cached": ("Prompt tokens that the prefix cache had.",),
    "vllm:prompt_tokens_cached_by_source": (
        "Tokens of admitted requests that the prefix cache had, by where it lies.",
        "source",
    ),
    "vllm:generation_tokens": ("New tokens.",),
    "vllm:num_preemptions": ("Running requests that lost their slot.",),
    "triptych:preemptions": ("Running requests that lost their slot, by reason.", "reason"),
    "triptych:deferred_requests": ("Requests that waited for a prefix that another request computed.",),
    "triptych:forked_sequences": (
        "Sequences that share a prompt computed by another sequence of their request.",
    ),
    "triptych:prefill_chunks": ("Prefill steps by compiled chunk size.", "bucket"),
    "triptych:prefill_tokens": ("Prompt tokens in prefill steps.", "bucket"),
    "triptych:prefill_padding_tokens": ("Padding tokens in prefill steps.", "bucket"),
    "triptych:decode_steps": ("Decode steps by compiled batch size.", "bucket"),
    "triptych:decode_rows": ("Rows of decode steps that held a request.", "bucket"),
    "triptych:decode_padding_rows": ("Rows of decode steps that held padding.", "bucket"),
    "triptych:forced_tokens": ("Tokens that a grammar determined, emitted without a forward pass.",),
    "triptych:plans": ("Plans with a step that were sent to the worker.",),
    "triptych:plans_ahead": ("Those that the worker had before it had answered the plan before.",),
    "triptych:late_graphs": ("Graphs that the worker made while it served.",),
    "triptych:grammar_seconds": ("Time that the worker's host took for the grammars of steps.",),
    "triptych:stall_seconds": ("Time that decoding requests waited for prefill steps.",),
    "triptych:block_copies": ("KV blocks copied.",),
    "triptych:windows_kept": ("Sliding windows copied for later requests.",),
    "triptych:kv_blocks_evicted": ("Cached KV blocks evicted for other content.",),
    "triptych:lora_loads": ("LoRA adapters loaded into the memory of the hosts.",),
    "triptych:lora_evictions": ("LoRA adapters freed there for others.",),
    "triptych:not_finite_requests": ("Requests that failed because the model computed NaN or infinity.",),
    "triptych:lora_placements": ("LoRA adapters copied to the device.",),
    "triptych:pool_batches": (
        "Batches of a pooling model by shape (rows x tokens, or texts/tokens if packed).",
        "shape",
    ),
    "triptych:pool_rows": ("Rows of pooling batches that held a request.", "shape"),
    "triptych:pool_padding_rows": ("Rows of pooling batches that held padding.", "shape"),
    "triptych:pool_tokens": ("Prompt tokens in pooling batches.", "shape"),
    "triptych:pool_padding_tokens": ("Padding tokens in pooling batches, padding rows included.", "shape"),
}

_HISTOGRAMS: Final[Mapping[str, tuple[str, ...]]] = {
    "vllm:iteration_tokens_total": ("Tokens of a step, prefill or decode, before padding.",),
    "vllm:request_queue_time_seconds": ("Time from arrival to the first slot, by request.",),
    "vllm:request_prefill_time_seconds": ("Time from the first slot to the first token, by request.",),
    "vllm:request_decode_time_seconds": ("Time from the first token to the last token, by request.",),
    "vllm:request_inference_time_seconds": ("Time from the first slot to the last token, by request.",),
    "vllm:request_num_preemptions": ("Preemptions, by request.",),
    "vllm:request_prefill_kv_computed_tokens": ("Prompt tokens that the prefix cache lacked, by request.",),
    "triptych:step_seconds": ("Time of a step on the worker.", "kind", "bucket"),
    "triptych:grammar_compile_seconds": ("Time that the worker took to compile a grammar.",),
}


class _Collected(Collector):
    """Metrics at one point in time."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


class UnservedRequests:
    """Counts requests of all clients without a whole answer, by outcome and error code."""

    def __init__(self) -> None:
        """Starts at zero."""
        self.counts: Counter[tuple[str, ...]] = Counter()

    def refused(self, error: TriptychError, count: int = 1) -> None:
        """Counts refused requests."""
        self.counts["refused", error.code_name] += count

    def ended(self, error: TriptychError | None) -> None:
        """Counts a failed request, or without an error an aborted sequence."""
        self.counts[("aborted", "aborted") if error is None else ("failed", error.code_name)] += 1


class SchedulerMetrics(Collector):
    """The metrics of a deployment.

    Counters outlive their replica: sums over replicas must not fall with a loss. A returning replica
    continues its counters. After many later losses they move to the engine "retired".
    """

    def __init__(self, deployment: Deployment, unread: UnreadLimits) -> None:
        """Measures `deployment` and the output not yet read by its clients."""
        self.certificates = CertificateDays("triptych:scheduler_certificate_days_left")
        self._deployment = deployment
        self._unread = unread
        self.unserved = UnservedRequests()
        """Requests without a whole answer."""
        self._gone: dict[str, Totals] = {}
        self._retired = Totals()
        deployment.on_detach(self._keep)

    async def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        # Collect here, at one point in time. Format in a thread: the text of many replicas takes longer than
        # a step.
        return await asyncio.to_thread(generate_latest, _Collected(list(self.collect())))

    def collect(self) -> Iterator[Metric]:
        """Yields the current metrics; before a model is served, only those without a model label."""
        deployment, unread = self._deployment, self._unread
        load, num_starting = deployment.load(), len(deployment.starting)
        states = {("ready",): len(load.replicas) - num_starting, ("configuring",): num_starting}
        yield _gauge("triptych:replicas", "Replicas by state.", states, "state")
        yield from _losses(deployment.losses)
        yield _counter(
            "triptych:unserved_requests", "Requests that were refused, failed or were aborted.",
            self.unserved.counts, "outcome", "code",
        )  # fmt: skip
        yield _counter(
            "triptych:timed_out_requests", "Requests that failed because they waited too long, by what for.",
            {(timeout.value,): deployment.timeouts.num_failed[timeout] for timeout in Timeout}, "reason",
        )  # fmt: skip
        yield _gauge(
            "triptych:unread_tokens", "Tokens that wait for clients of gRPC streams.", {(): unread.num_tokens}
        )
        yield _counter(
            "triptych:slow_readers", "gRPC streams that were ended because too much waited for their clients.",
            {(): unread.num_ended},
        )  # fmt: skip
        yield from self.certificates.collect()
        if deployment.served is not None:
            yield from self._of_model(deployment.served.name, load)

    def _of_model(self, model: str, load: Load) -> Iterator[Metric]:
        """Yields the metrics with a model label."""
        deployment = self._deployment
        assert deployment.served is not None
        live = deployment.engine.totals()
        yield from _requests(model, load)
        yield _counter(
            "vllm:admission_rejections", "Requests that the queue refused, by the limit that they would have exceeded.",
            {(model, reason): deployment.engine.rejections.get(reason, 0) for reason in (MAX_REQUESTS, MAX_TOKENS)},
            "model_name", "reason",
        )  # fmt: skip
        yield from _memory(model, deployment.engine.caches(), deployment.served.info.dtype)
        yield from self._loras()
        yield from _by_replica(model, self._totals(live), deployment.served.info.max_model_len)
        kinds = {"device_free": "free_memory_bytes", "process": "process_memory_bytes"}
        memory = {
            (model, name, kind): size
            for name, totals in live.items()
            for kind, field in kinds.items()
            if (size := getattr(totals.report, field))
        }
        text = "Memory of the worker: free on its device, or its process'."
        yield _gauge("triptych:worker_memory_bytes", text, memory, *_REPLICA, "kind")
        seconds = {
            (model, name, phase): value
            for name, phases in deployment.phase_seconds.items()
            for phase, value in phases.items()
        }
        text = "Time that each phase of the configuration took."
        yield _gauge("triptych:configuration_seconds", text, seconds, *_REPLICA, "phase")
        rows = Distribution(_BATCH_SIZES)
        for size, steps in deployment.histogram.counts_since_start.items():
            rows.observe(size, steps)
        histogram = HistogramMetricFamily(
            "triptych:batch_size", "Requests in a decode step, before padding.", labels=("model_name",)
        )
        _add(histogram, (model,), rows)
        yield histogram

    def _keep(self, replica_id: str, last: Totals) -> None:
        """Keeps the counters of a departing replica."""
        totals = self._gone.pop(replica_id, Totals())
        totals.add(last)
        self._gone[replica_id] = totals  # the last position: the dict is ordered by departure
        live = self._deployment.engine.totals()
        away = [name for name in self._gone if name == replica_id or name not in live]
        for name in away[: max(0, len(away) - _MAX_GONE)]:
            self._retired.add(self._gone.pop(name))

    def _totals(self, live: dict[str, Totals]) -> dict[str, Totals]:
        """Returns the counters of each replica over all of its lives, given those of the present lives."""
        kept = [*self._gone.items(), (RETIRED, self._retired)] if self._retired.counts else self._gone.items()
        totals: dict[str, Totals] = {}
        for name, figures in itertools.chain(kept, live.items()):
            totals.setdefault(name, Totals()).add(figures)
        return totals

    def _loras(self) -> Iterator[Metric]:
        """Yields the adapters with requests, as vLLM does: names in labels, the time as the value."""
        engine = self._deployment.engine
        if not engine.adapters.max_loras:
            return
        running: set[str] = set()
        waiting: set[str] = set()
        for request in engine.live():
            if request.adapter is not None:
                (waiting if request.slot is None else running).add(request.adapter.name)
        labels = (str(engine.adapters.max_loras), ",".join(sorted(waiting)), ",".join(sorted(running)))
        yield _gauge(
            "vllm:lora_requests_info",
            "LoRA adapters with running and with waiting requests; the value is the time, seconds since 1970.",
            {labels: time.time()}, "max_lora", "waiting_lora_adapters", "running_lora_adapters",
        )  # fmt: skip


def _memory(model: str, replicas: dict[str, KvCache], dtype: str) -> Iterator[Metric]:
    usage, blocks, prefixes, info = _Samples(), _Samples(), _Samples(), _Samples()
    for name, kv in replicas.items():
        usage[model, name] = kv.usage
        for group_id, group in enumerate(kv.groups):
            pool, labels = group.pool, (model, name, str(group_id))
            blocks[*labels, "used"], blocks[*labels, "free"] = pool.num_blocks - pool.num_free, pool.num_free
            prefixes[labels] = pool.num_cached
        facts = (kv.block_size, dtype, kv.caches_prefixes, name, kv.groups[0].pool.num_blocks)
        info[tuple(map(str, facts))] = 1
    text = "Share of KV blocks in use in the fullest group, 0 to 1."
    yield _gauge("vllm:kv_cache_usage_perc", text, usage, *_REPLICA)
    text = "KV blocks by state, used or free."
    yield _gauge("triptych:kv_blocks", text, blocks, *_REPLICA, "group", "state")
    text = "Cached prefixes that a request can hit."
    yield _gauge("triptych:cached_prefixes", text, prefixes, *_REPLICA, "group")
    yield _gauge(
        "vllm:cache_config_info", "The KV cache of each replica; the value is 1.", info,
        "block_size", "cache_dtype", "enable_prefix_caching", "engine", "num_gpu_blocks",
    )  # fmt: skip


def _losses(losses: Losses) -> Iterator[Metric]:
    text = "Attached workers that were lost or left, by reason."
    yield _counter(
        "triptych:lost_workers", text, {(loss.value,): losses.workers[loss] for loss in Loss}, "reason"
    )
    text = "Times that a replica computed nothing while requests ran, by kind: empty or unplanned."
    yield _counter(
        "triptych:stalled_replicas", text, {(stall.value,): losses.stalls[stall] for stall in Stall}, "reason"
    )
    text = "Requests that became suspects because of a lost worker."
    yield _counter("triptych:suspect_requests", text, {(): losses.num_suspects})
    text = "Requests that failed because too many workers were lost with them."
    yield _counter("triptych:poison_requests", text, {(): losses.num_failed})


def _requests(model: str, load: Load) -> Iterator[Metric]:
    running = {
        (model, replica.replica_id): replica.num_running
        for replica in load.replicas
        if replica.starting is None
    }
    yield _gauge("vllm:num_requests_running", "Requests that have a slot.", running, *_REPLICA)
    # The queue belongs to no replica: its `engine` is empty.
    waiting = {(model, ""): load.num_waiting}
    yield _gauge("vllm:num_requests_waiting", "Requests without a slot.", waiting, *_REPLICA)
    reasons = {
        (model, "", "capacity"): load.num_waiting - load.num_deferred,
        (model, "", "deferred"): load.num_deferred,
    }
    text = "Requests without a slot, by what they wait for."
    yield _gauge("vllm:num_requests_waiting_by_reason", text, reasons, *_REPLICA, "reason")
    text = "Tokens of requests that wait for a slot."
    yield _gauge("triptych:waiting_tokens", text, {(model,): load.num_waiting_tokens}, "model_name")


def _by_replica(model: str, totals: dict[str, Totals], longest: int) -> Iterator[Metric]:
    """Yields counters and histograms; no sequence is longer than `longest` tokens."""
    counters = {
        name: _counter(name, text, {}, *_REPLICA, *labels) for name, (text, *labels) in _COUNTERS.items()
    }
    histograms = {
        name: HistogramMetricFamily(name, text, labels=(*_REPLICA, *labels))
        for name, (text, *labels) in _HISTOGRAMS.items()
    }
    for name, figures in totals.items():
        for (metric, *labels), value in figures.counts.items():
            counters[metric].add_metric((model, name, *labels), value)
        for (metric, *labels), values in figures.distributions.items():
            _add(histograms[metric], (model, name, *labels), values, longest)
    yield from counters.values()
    yield from histograms.values()
    text = "Longest time that decoding requests waited for prefill steps since the start."
    stalls = {(model, name): figures.longest_stall_s for name, figures in totals.items()}
    yield _gauge("triptych:longest_stall_seconds", text, stalls, *_REPLICA)


def _gauge(name: str, text: str, samples: Mapping[_Labels, float], *labels: str) -> Metric:
    gauge = GaugeMetricFamily(name, text, labels=labels)
    for values, value in samples.items():
        gauge.add_metric(values, value)
    return gauge


def _counter(name: str, text: str, samples: Mapping[_Labels, float], *labels: str) -> CounterMetricFamily:
    counter = CounterMetricFamily(name, text, labels=labels)
    for values, value in samples.items():
        counter.add_metric(values, value)
    return counter


def _add(
    histogram: HistogramMetricFamily,
    labels: tuple[str, ...],
    values: Distribution,
    longest: int | None = None,
) -> None:
    """Adds a histogram's values; bounds of a request's tokens end at `longest`, as vLLM's do."""
    below = list(itertools.accumulate(values.counts))
    bounds = list(zip(values.bounds, below, strict=False))
    if longest is not None and values.bounds is REQUEST_TOKENS:
        bounds = [(bound, count) for bound, count in bounds if bound <= longest]
    buckets = [(str(float(bound)), float(count)) for bound, count in bounds]
    histogram.add_metric(labels, [*buckets, ("+Inf", float(below[-1]))], values.total)
