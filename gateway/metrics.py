"""The gateway's metrics, under vLLM's names where vLLM has them."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from protos.overload.unread import UnreadLimits

# vLLM's bucket bounds, seconds: dashboards made for vLLM keep working.
_TTFT: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_INTER_TOKEN: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_END_TO_END: Final = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip


class _Observations:
    """The values of one label. `prometheus_client` takes locks for each value, and each token is one."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts a value. Only the event loop's thread may call it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: tuple[str, ...]) -> None:
        """Adds the buckets, each with the ones below it, and the sum."""
        buckets, below = [], 0
        names = (*(str(float(bound)) for bound in self._bounds), "+Inf")
        for name, count in zip(names, self._counts, strict=True):
            below += count
            buckets.append((name, float(below)))
        family.add_metric(labels, buckets, self._sum)


class _TokenHistogram(Collector):
    """A histogram by model name for values that come with every token."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...], registry: CollectorRegistry) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._by_model: dict[str, _Observations] = {}
        registry.register(self)

    def labels(self, model_name: str) -> _Observations:
        """Returns the values of a model."""
        return self._by_model.setdefault(model_name, _Observations(self._bounds))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yields the metric, for a scrape."""
        family = HistogramMetricFamily(self._name, self._text, labels=("model_name",))
        for model_name, observations in self._by_model.items():
            observations.add_to(family, (model_name,))
        yield family


class _SlowReaders(Collector):
    """What waits for clients, and the answers that were ended for it."""

    def __init__(self, unread: UnreadLimits) -> None:
        self._unread = unread

    def collect(self) -> Iterator[Metric]:
        """Yields both metrics, for a scrape."""
        yield GaugeMetricFamily(
            "triptych:gateway_unread_tokens",
            "Tokens that wait for HTTP clients that read slowly.",
            value=self._unread.num_tokens,
        )
        yield CounterMetricFamily(
            "triptych:gateway_slow_readers",
            "Answers that were ended because too much waited for their clients.",
            value=self._unread.num_ended,
        )


class Metrics:
    """One gateway's metrics, in their own registry."""

    def __init__(
        self,
        model_name: Callable[[], str],
        num_pending: Callable[[], int],
        num_parked: Callable[[], int],
        unread: UnreadLimits,
    ) -> None:
        """Creates the metrics.

        Args:
            model_name: returns the served model's name at the moment, for labels.
            num_pending: returns how many requests have not finished, parked ones included.
            num_parked: returns how many new requests wait for a scheduler with a ready worker.
            unread: what waits for clients.
        """
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self._model_name = model_name
        self._labelled: str | None = None
        names = ("model_name",)
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _TTFT)
        self._itl = _TokenHistogram(
            "vllm:inter_token_latency_seconds",
            "Time between tokens of a sequence.",
            _INTER_TOKEN,
            self.registry,
        )
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _END_TO_END)
        self._prompt = Counter(
            "vllm:prompt_tokens", "Prompt tokens of finished sequences.", names, registry=self.registry
        )
        self._generated = Counter(
            "vllm:generation_tokens", "Tokens generated.", names, registry=self.registry
        )
        # Generated tokens that the counter does not have yet.
        self._uncounted = 0
        self._success = Counter(
            "vllm:request_success", "Finished sequences.", (*names, "finished_reason"), registry=self.registry
        )
        self._http = Counter(
            "http_requests",
            "Answered HTTP requests.",
            ("handler", "method", "status"),
            registry=self.registry,
        )
        self.http_in_flight = self._gauge(
            "triptych:gateway_http_requests_in_flight", "HTTP requests under way."
        )
        self._gauge(
            "triptych:gateway_requests_in_flight", "Requests under way at the scheduler, or parked."
        ).set_function(num_pending)
        self._gauge(
            "triptych:gateway_parked_requests", "New requests that wait for a scheduler with a ready worker."
        ).set_function(num_parked)
        self.registry.register(_SlowReaders(unread))
        self._scheduler_up = self._gauge(
            "triptych:gateway_scheduler_up", "Whether the scheduler's metrics follow."
        )

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ("model_name",), buckets=bounds, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)

    def _relabel(self) -> None:
        # Looking up a labelled child costs more than observing it, and tokens arrive by the thousand.
        name = self._model_name()
        if name == self._labelled:
            return
        self._count_tokens()
        self._labelled = name
        self._ttft_now = self._ttft.labels(name)
        self._itl_now = self._itl.labels(name)
        self._e2e_now = self._e2e.labels(name)
        self._prompt_now = self._prompt.labels(name)
        self._generated_now = self._generated.labels(name)

    def first_token(self, count: int, seconds: float) -> None:
        """Records a sequence's first ``count`` tokens, ``seconds`` after the request's arrival."""
        self._relabel()
        self._ttft_now.observe(seconds)
        self._uncounted += count

    def tokens(self, count: int, seconds: float) -> None:
        """Records ``count`` further tokens, each ``seconds`` after the one before."""
        self._itl_now.observe(seconds)
        self._uncounted += count

    def _count_tokens(self) -> None:
        if self._uncounted:
            self._generated_now.inc(self._uncounted)
            self._uncounted = 0

    def finished(self, reason: str, num_prompt_tokens: int, seconds: float) -> None:
        """Records the end of a sequence, ``seconds`` after the request's arrival."""
        self._relabel()
        self._prompt_now.inc(num_prompt_tokens)
        self._e2e_now.observe(seconds)
        self._success.labels(self._model_name(), reason).inc()

    def answered(self, handler: str, method: str, status: int) -> None:
        """Records an HTTP answer; ``handler`` is the route's pattern."""
        self._http.labels(handler, method, str(status)).inc()

    def text(self, scheduler: bytes | None = None) -> bytes:
        """Returns all metrics in Prometheus' text format.

        Args:
            scheduler: the scheduler's metrics in the same format, under other names; ``None`` if the
                scheduler does not answer.
        """
        if self._model_name():
            # A scrape before the first request then shows zeros instead of nothing.
            self._relabel()
        self._count_tokens()
        self._scheduler_up.set(scheduler is not None)
        return generate_latest(self.registry) + (scheduler or b"")
