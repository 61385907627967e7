"""The scheduler's metrics, under vLLM's names where vLLM has them. docs/metrics.md lists them.

Steps only increment plain counters, which become metrics at each scrape. The gateway measures what clients
see (latencies, tokens, finish reasons); that is not repeated here.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from protos.errors import TriptychError
from protos.service.backpressure import UnreadLimits
from protos.service.certificate_metrics import CertificateDays
from scheduler_svc.dispatch.load import Load, ReplicaMemory, Totals
from scheduler_svc.dispatch.request_timeouts import RequestTimeouts, Timeout
from scheduler_svc.policy.tenants import MAX_REQUESTS, MAX_TOKENS
from scheduler_svc.replica.stats import REQUEST_TOKENS, Distribution
from scheduler_svc.replica.suspects import Loss
from scheduler_svc.workers.deployment import Deployment
from scheduler_svc.workers.losses import Losses
from scheduler_svc.workers.progress import Stall

# Lost replicas that keep counters of their own.
_MAX_GONE: Final = 16

# The `engine` label for the sum over replicas that were lost before those.
RETIRED: Final = "retired"

# Rows of decode steps; a scheduler has at most 4096 slots.
_BATCH_SIZES: Final = tuple(2**n for n in range(13))


class _Family(NamedTuple):
    """One metric that every replica has."""

    name: str
    text: str
    labels: tuple[str, ...] = ()
    """Labels besides the model and the replica."""


_COUNTERS: Final = (
    _Family("vllm:prefix_cache_queries", "Tokens of admitted requests."),
    _Family("vllm:prefix_cache_hits", "Tokens of admitted requests that the prefix cache had."),
    _Family("vllm:prompt_tokens", "Prompt tokens of requests that began to answer."),
    _Family("vllm:prompt_tokens_by_source", "Prompt tokens by how they were processed.", ("source",)),
    _Family("vllm:prompt_tokens_cached", "Prompt tokens that the prefix cache had."),
    _Family(
        "vllm:prompt_tokens_cached_by_source",
        "Tokens of admitted requests that the prefix cache had, by where it lies.",
        ("source",),
    ),
    _Family("vllm:generation_tokens", "New tokens."),
    _Family("vllm:num_preemptions", "Running requests that lost their slot."),
    _Family("triptych:preemptions", "Running requests that lost their slot, by reason.", ("reason",)),
    _Family("triptych:deferred_requests", "Requests that waited for a prefix that another request computed."),
    _Family(
        "triptych:forked_sequences",
        "Sequences that share a prompt computed by another sequence of their request.",
    ),
    _Family("triptych:prefill_chunks", "Prefill steps by compiled chunk size.", ("bucket",)),
    _Family("triptych:prefill_tokens", "Prompt tokens in prefill steps.", ("bucket",)),
    _Family("triptych:prefill_padding_tokens", "Padding tokens in prefill steps.", ("bucket",)),
    _Family("triptych:decode_steps", "Decode steps by compiled batch size.", ("bucket",)),
    _Family("triptych:decode_rows", "Rows of decode steps that held a request.", ("bucket",)),
    _Family("triptych:decode_padding_rows", "Rows of decode steps that held padding.", ("bucket",)),
    _Family("triptych:forced_tokens", "Tokens that a grammar determined, emitted without a forward pass."),
    _Family("triptych:plans", "Plans with a step that were sent to the worker."),
    _Family("triptych:plans_ahead", "Those that the worker had before it had answered the plan before."),
    _Family("triptych:late_graphs", "Graphs that the worker made while it served."),
    _Family("triptych:grammar_seconds", "Time that the worker's host took for the grammars of steps."),
    _Family("triptych:stall_seconds", "Time that decoding requests waited for prefill steps."),
    _Family("triptych:block_copies", "KV blocks copied."),
    _Family("triptych:windows_kept", "Sliding windows copied for later requests."),
    _Family("triptych:kv_blocks_evicted", "Cached KV blocks evicted for other content."),
    _Family("triptych:lora_loads", "LoRA adapters loaded into the memory of the hosts."),
    _Family("triptych:lora_evictions", "LoRA adapters freed there for others."),
    _Family(
        "triptych:not_finite_requests", "Requests that failed because the model computed NaN or infinity."
    ),
    _Family("triptych:lora_placements", "LoRA adapters copied to the device."),
    _Family(
        "triptych:pool_batches",
        "Batches of a pooling model by shape (rows x tokens, or texts/tokens if packed).",
        ("shape",),
    ),
    _Family("triptych:pool_rows", "Rows of pooling batches that held a request.", ("shape",)),
    _Family("triptych:pool_padding_rows", "Rows of pooling batches that held padding.", ("shape",)),
    _Family("triptych:pool_tokens", "Prompt tokens in pooling batches.", ("shape",)),
    _Family(
        "triptych:pool_padding_tokens",
        "Padding tokens in pooling batches, padding rows included.",
        ("shape",),
    ),
)

_HISTOGRAMS: Final = (
    _Family("vllm:iteration_tokens_total", "Tokens of a step, prefill or decode, before padding."),
    _Family("vllm:request_queue_time_seconds", "Time from arrival to the first slot, by request."),
    _Family("vllm:request_prefill_time_seconds", "Time from the first slot to the first token, by request."),
    _Family("vllm:request_decode_time_seconds", "Time from the first token to the last token, by request."),
    _Family("vllm:request_inference_time_seconds", "Time from the first slot to the last token, by request."),
    _Family("vllm:request_num_preemptions", "Preemptions, by request."),
    _Family(
        "vllm:request_prefill_kv_computed_tokens", "Prompt tokens that the prefix cache lacked, by request."
    ),
    _Family("triptych:step_seconds", "Time of a step on the worker.", ("kind", "bucket")),
    _Family("triptych:grammar_compile_seconds", "Time that the worker took to compile a grammar."),
)


class _Collected(Collector):
    """Metrics that have been collected already."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


class UnservedRequests:
    """Counts requests of all clients that brought no whole answer, by what happened and the error's code."""

    def __init__(self) -> None:
        """Starts at zero."""
        self._counts: Counter[tuple[str, str]] = Counter()

    def refused(self, error: TriptychError, count: int = 1) -> None:
        """Counts requests that were not accepted."""
        self._counts["refused", error.code_name] += count

    def ended(self, error: TriptychError | None) -> None:
        """Counts an accepted request that failed, or without an error a sequence that was aborted."""
        self._counts[
            "aborted" if error is None else "failed", "aborted" if error is None else error.code_name
        ] += 1

    def metric(self) -> Metric:
        """Returns the counter."""
        requests = CounterMetricFamily(
            "triptych:unserved_requests",
            "Requests that were refused, failed or were aborted.",
            labels=("outcome", "code"),
        )
        for labels, count in self._counts.items():
            requests.add_metric(labels, count)
        return requests


class SchedulerMetrics(Collector):
    """The metrics of a deployment.

    Counters outlive their replica, because sums over replicas must not fall when one is lost. They continue
    if the replica returns. Once many other replicas have been lost after it, they move to the engine
    "retired".
    """

    def __init__(self, deployment: Deployment, unread: UnreadLimits) -> None:
        """Measures `deployment`, and what waits for its slow clients."""
        self.certificates = CertificateDays("triptych:scheduler_certificate_days_left")
        self._deployment = deployment
        self._unread = unread
        self.unserved = UnservedRequests()
        """Requests that brought no whole answer."""
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
        load = self._deployment.load()
        replicas = GaugeMetricFamily("triptych:replicas", "Replicas by state.", labels=("state",))
        num_starting = len(self._deployment.starting)
        replicas.add_metric(("ready",), len(load.replicas) - num_starting)
        replicas.add_metric(("configuring",), num_starting)
        yield replicas
        yield from _losses(self._deployment.losses)
        yield self.unserved.metric()
        yield _timeouts(self._deployment.timeouts)
        yield from _unread(self._unread)
        yield from self.certificates.collect()
        served = self._deployment.served
        if served is None:
            return
        live = self._deployment.engine.totals()
        yield from _requests(served.name, load)
        yield _rejections(served.name, self._deployment.engine.rejections)
        yield from _memory(served.name, self._deployment.engine.memory(), served.model.dtype)
        yield from self._loras()
        yield from _by_replica(served.name, self._totals(live), served.max_model_len)
        yield from _workers(served.name, live)
        yield self._phase_seconds(served.name)
        yield self._batch_sizes(served.name)

    def _keep(self, replica_id: str, last: Totals) -> None:
        """Keeps the counters of a replica that is lost or leaves."""
        totals = self._gone.pop(replica_id, Totals())
        totals.add(last)
        self._gone[replica_id] = totals  # the last position: the dict is ordered by departure
        live = self._deployment.engine.totals()
        away = [name for name in self._gone if name == replica_id or name not in live]
        for name in away[: max(0, len(away) - _MAX_GONE)]:
            self._retired.add(self._gone.pop(name))

    def _totals(self, live: dict[str, Totals]) -> dict[str, Totals]:
        """Returns counters by replica, over all of its lives; `live` has those of its present one."""
        kept = [*self._gone.items(), (RETIRED, self._retired)] if self._retired.counts else self._gone.items()
        totals: dict[str, Totals] = {}
        for name, figures in itertools.chain(kept, live.items()):
            totals.setdefault(name, Totals()).add(figures)
        return totals

    def _loras(self) -> Iterator[Metric]:
        """Yields the adapters with requests, as vLLM does: the labels say which, the value is the time."""
        engine = self._deployment.engine
        if not engine.adapters.max_loras:
            return
        running: set[str] = set()
        waiting: set[str] = set()
        for request in engine.live():
            if request.adapter is not None:
                (waiting if request.slot is None else running).add(request.adapter.name)
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "LoRA adapters with running and with waiting requests; the value is the time, seconds since 1970.",
            labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
        )
        labels = (str(engine.adapters.max_loras), ",".join(sorted(waiting)), ",".join(sorted(running)))
        info.add_metric(labels, time.time())
        yield info

    def _phase_seconds(self, model: str) -> Metric:
        seconds = _gauge(
            "triptych:configuration_seconds",
            "Time that each phase of the configuration took.",
            "engine",
            "phase",
        )
        for name, phases in self._deployment.phase_seconds.items():
            for phase, value in phases.items():
                seconds.add_metric((model, name, phase), value)
        return seconds

    def _batch_sizes(self, model: str) -> Metric:
        """Returns the distribution over the decode steps of all replicas."""
        rows = Distribution(_BATCH_SIZES)
        for size, steps in self._deployment.histogram.counts_since_start.items():
            rows.observe(size, steps)
        histogram = HistogramMetricFamily(
            "triptych:batch_size", "Requests in a decode step, before padding.", labels=("model_name",)
        )
        _add(histogram, (model,), rows)
        return histogram


def _memory(model: str, replicas: dict[str, ReplicaMemory], dtype: str) -> Iterator[Metric]:
    usage = _gauge(
        "vllm:kv_cache_usage_perc", "Share of KV blocks in use in the fullest group, 0 to 1.", "engine"
    )
    blocks = _gauge("triptych:kv_blocks", "KV blocks by state, used or free.", "engine", "group", "state")
    prefixes = _gauge(
        "triptych:cached_prefixes", "Cached prefixes that a request can hit.", "engine", "group"
    )
    info = GaugeMetricFamily(
        "vllm:cache_config_info",
        "The KV cache of each replica; the value is 1.",
        labels=("block_size", "cache_dtype", "enable_prefix_caching", "engine", "num_gpu_blocks"),
    )
    for name, memory in replicas.items():
        usage.add_metric((model, name), memory.usage)
        for group_id, group in enumerate(memory.groups):
            labels = (model, name, str(group_id))
            blocks.add_metric((*labels, "used"), group.num_used)
            blocks.add_metric((*labels, "free"), group.num_free)
            prefixes.add_metric(labels, group.num_cached)
        num_blocks = memory.groups[0].num_used + memory.groups[0].num_free
        facts = (memory.block_size, dtype, memory.prefix_caching, name, num_blocks)
        info.add_metric([str(fact) for fact in facts], 1)
    yield from (usage, blocks, prefixes, info)


def _rejections(model: str, rejections: Mapping[str, int]) -> Metric:
    requests = CounterMetricFamily(
        "vllm:admission_rejections",
        "Requests that the queue refused, by the limit that they would have exceeded.",
        labels=("model_name", "reason"),
    )
    for reason in (MAX_REQUESTS, MAX_TOKENS):
        requests.add_metric((model, reason), rejections.get(reason, 0))
    return requests


def _workers(model: str, replicas: dict[str, Totals]) -> Iterator[Metric]:
    """Yields what workers reported last."""
    memory = _gauge(
        "triptych:worker_memory_bytes",
        "Memory of the worker: free on its device, or its process'.",
        "engine",
        "kind",
    )
    for name, figures in replicas.items():
        report = figures.report
        for kind, size in ("device_free", report.free_memory_bytes), ("process", report.process_memory_bytes):
            if size:
                memory.add_metric((model, name, kind), size)
    yield memory


def _losses(losses: Losses) -> Iterator[Metric]:
    workers = CounterMetricFamily(
        "triptych:lost_workers", "Attached workers that were lost or left, by reason.", labels=("reason",)
    )
    for loss in Loss:
        workers.add_metric((loss.value,), losses.workers[loss])
    yield workers
    stalls = CounterMetricFamily(
        "triptych:stalled_replicas",
        "Times that a replica computed nothing while requests ran, by kind: empty or unplanned.",
        labels=("reason",),
    )
    for stall in Stall:
        stalls.add_metric((stall.value,), losses.stalls[stall])
    yield stalls
    yield CounterMetricFamily(
        "triptych:suspect_requests",
        "Requests that became suspects because of a lost worker.",
        value=losses.num_suspects,
    )
    yield CounterMetricFamily(
        "triptych:poison_requests",
        "Requests that failed because too many workers were lost with them.",
        value=losses.num_failed,
    )


def _timeouts(timeouts: RequestTimeouts) -> Metric:
    requests = CounterMetricFamily(
        "triptych:timed_out_requests",
        "Requests that failed because they waited too long, by what for.",
        labels=("reason",),
    )
    for timeout in Timeout:
        requests.add_metric((timeout.value,), timeouts.num_failed[timeout])
    return requests


def _unread(unread: UnreadLimits) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "triptych:unread_tokens", "Tokens that wait for clients of gRPC streams.", value=unread.num_tokens
    )
    yield CounterMetricFamily(
        "triptych:slow_readers",
        "gRPC streams that were ended because too much waited for their clients.",
        value=unread.num_ended,
    )


def _requests(model: str, load: Load) -> Iterator[Metric]:
    running = _gauge("vllm:num_requests_running", "Requests that have a slot.", "engine")
    for replica in load.replicas:
        if replica.starting is None:
            running.add_metric((model, replica.replica_id), replica.num_running)
    yield running
    # The queue belongs to no replica: its `engine` is empty.
    waiting = _gauge("vllm:num_requests_waiting", "Requests without a slot.", "engine")
    waiting.add_metric((model, ""), load.num_waiting)
    yield waiting
    reasons = _gauge(
        "vllm:num_requests_waiting_by_reason",
        "Requests without a slot, by what they wait for.",
        "engine",
        "reason",
    )
    reasons.add_metric((model, "", "capacity"), load.num_waiting - load.num_deferred)
    reasons.add_metric((model, "", "deferred"), load.num_deferred)
    yield reasons
    tokens = _gauge("triptych:waiting_tokens", "Tokens of requests that wait for a slot.")
    tokens.add_metric((model,), load.num_waiting_tokens)
    yield tokens


def _by_replica(model: str, totals: dict[str, Totals], longest: int) -> Iterator[Metric]:
    """Yields counters and histograms; `longest` is the most tokens that a sequence can have."""
    counters = {
        family.name: CounterMetricFamily(
            family.name, family.text, labels=("model_name", "engine", *family.labels)
        )
        for family in _COUNTERS
    }
    histograms = {
        family.name: HistogramMetricFamily(
            family.name, family.text, labels=("model_name", "engine", *family.labels)
        )
        for family in _HISTOGRAMS
    }
    for name, figures in totals.items():
        for (metric, *labels), value in figures.counts.items():
            counters[metric].add_metric((model, name, *labels), value)
        for (metric, *labels), values in figures.distributions.items():
            _add(histograms[metric], (model, name, *labels), values, longest)
    yield from counters.values()
    yield from histograms.values()
    stall = _gauge(
        "triptych:longest_stall_seconds",
        "Longest time that decoding requests waited for prefill steps since the start.",
        "engine",
    )
    for name, figures in totals.items():
        stall.add_metric((model, name), figures.longest_stall_s)
    yield stall


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=("model_name", *labels))


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
