"""The gateway's metrics, under vLLM's names where vLLM has them."""

import asyncio
import contextlib
import operator
import uuid
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

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
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from protos.errors import ConfigurationRefused
from protos.service.backpressure import UnreadLimits
from protos.service.certificate_metrics import CertificateDays
from protos.service.logs import get_logger
from protos.service.private_files import make_folder

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
# vLLM ends these at the longest sequence; so do scrapes.
_TOKENS: Final = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
_N: Final = (1, 2, 5, 10, 20)

# Seconds of HTTP requests: streams last as long as their answers.
_HTTP: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

# Engines with series of their own; workers without a replica id have a new one after each start.
_MAX_ENGINES: Final = 64

# The `engine` label for the sum over those that were met before them, as in the scheduler's metrics.
_RETIRED: Final = "retired"

_CERTIFICATES: Final = "triptych:gateway_certificate_days_left"

# vLLM's reasons for the end of a sequence.
_REASONS: Final = ("stop", "length", "abort", "error")


class _Family(NamedTuple):
    """A histogram of each engine."""

    name: str
    text: str
    bounds: tuple[float, ...]


_HISTOGRAMS: Final = {
    "ttft": _Family("vllm:time_to_first_token_seconds", "Arrival to first token.", _TTFT),
    "itl": _Family("vllm:inter_token_latency_seconds", "Time between tokens of a sequence.", _INTER_TOKEN),
    "tpot": _Family(
        "vllm:request_time_per_output_token_seconds", "Mean time between tokens, by sequence.", _INTER_TOKEN
    ),
    "e2e": _Family("vllm:e2e_request_latency_seconds", "Arrival to last token.", _END_TO_END),
    "prompt": _Family("vllm:request_prompt_tokens", "Prompt tokens of a sequence.", _TOKENS),
    "generation": _Family("vllm:request_generation_tokens", "Generated tokens of a sequence.", _TOKENS),
    "longest": _Family(
        "vllm:request_max_num_generation_tokens", "Tokens of the longest sequence of a prompt.", _TOKENS
    ),
    "n": _Family("vllm:request_params_n", "Sequences that a request asks for.", _N),
    "max_tokens": _Family("vllm:request_params_max_tokens", "Tokens that a request asks for.", _TOKENS),
}


class _Observations:
    """The values of a histogram, without the locks of `prometheus_client`: each token is a value."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value. Only the event loop's thread may call it."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def add(self, other: "_Observations") -> None:
        """Adds the values of another histogram with the same bounds."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def add_to(self, family: HistogramMetricFamily, labels: tuple[str, ...], longest: int) -> None:
        """Adds cumulative buckets and the sum. Bounds of tokens end at ``longest``."""
        buckets, below = [], 0
        for bound, count in zip(self._bounds, self.counts, strict=False):
            below += count
            if self._bounds is not _TOKENS or bound <= longest:
                buckets.append((str(float(bound)), float(below)))
        buckets.append(("+Inf", float(below + self.counts[-1])))
        family.add_metric(labels, buckets, self.total)


class EngineMetrics:
    """Measurements of the sequences of an engine, which is a replica of the deployment."""

    __slots__ = ("_observe_gap", "finished_by_reason", "histograms")

    def __init__(self) -> None:
        """Starts empty."""
        self.histograms = {key: _Observations(family.bounds) for key, family in _HISTOGRAMS.items()}
        """Histograms by their keys in the table above."""
        self.finished_by_reason: Counts[str] = Counts()
        """Ended sequences, by reason."""
        self._observe_gap = self.histograms["itl"].observe

    def first_token(self, seconds: float) -> None:
        """Records a sequence's first token, ``seconds`` after the request's arrival."""
        self.histograms["ttft"].observe(seconds)

    def tokens(self, count: int, seconds: float) -> None:
        """Records ``count`` further tokens that came together, ``seconds`` after the tokens before them."""
        self._observe_gap(seconds / count, count)

    def finished(
        self, reason: str, seconds: float, *, prompt: int, generated: int = 0, per_token: float = 0.0
    ) -> None:
        """Records the end of a sequence: time since arrival, tokens, and mean seconds between them."""
        self.finished_by_reason[reason] += 1
        self.histograms["e2e"].observe(seconds)
        self.histograms["prompt"].observe(prompt)
        self.histograms["generation"].observe(generated)
        self.histograms["tpot"].observe(per_token)

    def answered(self, n: int, max_tokens: int | None, longest: int) -> None:
        """Records the end of all ``n`` sequences of a prompt, and the tokens of the longest."""
        self.histograms["n"].observe(n)
        self.histograms["longest"].observe(longest)
        if max_tokens is not None:
            self.histograms["max_tokens"].observe(max_tokens, n)

    def add(self, other: "EngineMetrics") -> None:
        """Adds the figures of another engine."""
        self.finished_by_reason += other.finished_by_reason
        for key, values in other.histograms.items():
            self.histograms[key].add(values)

    def unfinished(self, reason: str) -> None:
        """Records an unfinished sequence: "abort" or "error"."""
        self.finished_by_reason[reason] += 1


class _Engines(Collector):
    """The metrics of all engines, by model and engine."""

    def __init__(self, max_model_len: Callable[[], int]) -> None:
        self._max_model_len = max_model_len
        self._engines: dict[tuple[str, str], EngineMetrics] = {}

    def find(self, model_name: str, engine: str) -> EngineMetrics:
        """Returns the metrics of an engine."""
        found = self._engines.get((model_name, engine))
        if found is None:
            if len(self._engines) >= _MAX_ENGINES:
                self._retire_oldest()
            found = self._engines[model_name, engine] = EngineMetrics()
        return found

    def _retire_oldest(self) -> None:
        model_name, engine = next(key for key in self._engines if key[1] not in ("", _RETIRED))
        retired = self._engines.setdefault((model_name, _RETIRED), EngineMetrics())
        retired.add(self._engines.pop((model_name, engine)))

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics, for a scrape."""
        longest = self._max_model_len()
        for key, family in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(family.name, family.text, labels=("model_name", "engine"))
            for labels, engine in self._engines.items():
                engine.histograms[key].add_to(histogram, labels, longest)
            yield histogram
        success = CounterMetricFamily(
            "vllm:request_success",
            "Sequences that have ended.",
            labels=("model_name", "engine", "finished_reason"),
        )
        for labels, engine in self._engines.items():
            for reason in _REASONS:
                success.add_metric((*labels, reason), engine.finished_by_reason[reason])
        yield success


class _SlowReaders(Collector):
    """Unread output, and the answers ended for it."""

    def __init__(self, unread: UnreadLimits) -> None:
        self._unread = unread

    def collect(self) -> Iterator[Metric]:
        """Yields both metrics, for a scrape."""
        yield GaugeMetricFamily(
            "triptych:gateway_unread_bytes",
            "Bytes of streams not yet read by slow HTTP clients.",
            value=self._unread.num_tokens,
        )
        yield CounterMetricFamily(
            "triptych:gateway_slow_readers",
            "Answers that were ended because too much waited for their clients.",
            value=self._unread.num_ended,
        )


class Metrics:
    """A gateway's metrics, in their own registry."""

    num_in_flight: int
    """HTTP requests under way."""

    def __init__(
        self,
        model_name: Callable[[], str],
        num_pending: Callable[[], int],
        num_parked: Callable[[], int],
        is_refused: Callable[[], bool],
        unread: UnreadLimits,
        num_body_bytes: Callable[[], int],
        max_model_len: Callable[[], int],
    ) -> None:
        """Creates the metrics."""
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self._model_name = model_name
        self._engines = _Engines(max_model_len)
        self.registry.register(self._engines)
        self._http = Counter(
            "http_requests",
            "Answered HTTP requests.",
            ("handler", "method", "status"),
            registry=self.registry,
        )
        self._durations = Histogram(
            "http_request_duration_seconds",
            "Time from an HTTP request's head to the end of its answer.",
            ("handler", "method"),
            buckets=_HTTP,
            registry=self.registry,
        )
        self._errors = Counter(
            "triptych:gateway_errors",
            "HTTP requests that were refused or failed, by the code of the error.",
            ("handler", "code"),
            registry=self.registry,
        )
        self.num_in_flight = 0
        self._gauge("triptych:gateway_http_requests_in_flight", "HTTP requests under way.").set_function(
            lambda: self.num_in_flight
        )
        self._gauge(
            "triptych:gateway_requests_in_flight", "Requests under way at the scheduler, or parked."
        ).set_function(num_pending)
        self._gauge(
            "triptych:gateway_parked_requests", "New requests that wait for a scheduler with a ready worker."
        ).set_function(num_parked)
        self._gauge(
            "triptych:gateway_body_bytes", "Bytes of the bodies of HTTP requests under way."
        ).set_function(num_body_bytes)
        self.registry.register(_SlowReaders(unread))
        self._scheduler_up = self._gauge(
            "triptych:gateway_scheduler_up", "Whether the scheduler's metrics follow."
        )
        self._gauge(
            "triptych:gateway_scheduler_refuses",
            "Whether the scheduler refuses this gateway, as one of another release or service token.",
        ).set_function(is_refused)
        self.certificates = CertificateDays(_CERTIFICATES)
        self.registry.register(self.certificates)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)

    @contextlib.contextmanager
    def in_flight(self) -> Iterator[None]:
        """Counts an HTTP request while it is under way."""
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1

    def engine(self, replica_id: str) -> EngineMetrics:
        """Returns the metrics of a replica; without an id, those of requests before any replica."""
        return self._engines.find(self._model_name(), replica_id)

    def answered(self, handler: str, method: str, status: int, seconds: float, error: str | None) -> None:
        """Records an HTTP answer. The status is 0 if the client left first."""
        self._http.labels(handler, method, str(status)).inc()
        self._durations.labels(handler, method).observe(seconds)
        if error is not None:
            self._errors.labels(handler, error).inc()

    def scheduler_answers(self, answers: bool) -> None:
        """Records whether the scheduler's metrics are at hand."""
        self._scheduler_up.set(answers)

    def text(self) -> bytes:
        """Returns this gateway's metrics in Prometheus' text format."""
        if self._model_name():
            # A scrape before the first request then shows zeros instead of nothing.
            self.engine("")
        return generate_latest(self.registry)


_TIMEOUT_S: Final = 2.0
# Ends a text. Part of one, from a gateway that dies or stalls, would add up to wrong figures.
_END: Final = b"# EOF\n"

# Figures of a process mean nothing when they are added up. They are on its own --metrics-port.
_OF_ONE_PROCESS: Final = ("process_", "python_")
# Gauges that do not add up. A gateway that has not read renewed certificates must show.
_COMMON: Final[dict[str, Callable[[float, float], float]]] = {
    "triptych:gateway_scheduler_up": max,
    "triptych:gateway_scheduler_refuses": max,
    _CERTIFICATES: min,
}


class SharedMetrics:
    """A gateway's part in the metrics of all."""

    def __init__(self, folder: Path, own_text: Callable[[], bytes]) -> None:
        """Prepares the part, with a socket in ``folder``; :meth:`start` makes it readable."""
        self._folder = folder
        self._own_text = own_text
        self._path = folder / f"{uuid.uuid4().hex[:12]}.sock"
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listens for the other gateways.

        Raises:
            ConfigurationRefused: if there can be no socket in the folder.
        """
        try:
            make_folder(self._folder, "--metrics-folder", "choose another")
            self._path.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._answer, self._path)
        except OSError as error:
            raise ConfigurationRefused(
                f"--metrics-folder {self._folder}: {error.strerror or error}; choose another folder"
            ) from error

    async def close(self) -> None:
        """Stops listening and removes the socket."""
        if self._server is not None:
            self._server.close()
        self._path.unlink(missing_ok=True)

    async def text(self) -> bytes:
        """Returns the sum of all gateways' metrics, with the number of those that answered in time."""
        paths = [path for path in sorted(self._folder.glob("*.sock")) if path != self._path]
        found = await asyncio.gather(*map(_read, paths))
        texts = [self._own_text(), *(text for text in found if text is not None)]
        return await asyncio.to_thread(merged, texts)

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_TIMEOUT_S):
                writer.write(self._own_text() + _END)
                await writer.drain()
        writer.close()


async def _read(path: Path) -> bytes | None:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                text = await reader.read()
            finally:
                writer.close()
        if text.endswith(_END):
            return text
        get_logger().warning("a gateway's metrics are missing", socket=str(path), error="cut short")
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)  # noqa: ASYNC240 - quick; its process has died
    except FileNotFoundError:
        pass  # its process has just ended
    except (OSError, TimeoutError) as error:
        get_logger().warning("a gateway's metrics are missing", socket=str(path), error=str(error))
    return None


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def merged(texts: Iterable[bytes]) -> bytes:
    """Returns the sum of metrics in Prometheus' text format, sample by sample."""
    values: dict[tuple[str, str, tuple[tuple[str, str], ...]], float] = {}
    families: dict[str, Metric] = {}
    count = 0
    for count, text in enumerate(texts, start=1):  # noqa: B007 - the last count is the number of processes
        for family in text_string_to_metric_families(text.decode()):
            if family.name.startswith(_OF_ONE_PROCESS):
                continue
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                key = (family.name, sample.name, tuple(sorted(sample.labels.items())))
                join = max if sample.name.endswith("_created") else _COMMON.get(family.name, operator.add)
                values[key] = join(values[key], sample.value) if key in values else sample.value
    for (name, sample_name, labels), value in values.items():
        families[name].add_sample(sample_name, dict(labels), value)
    processes = Metric("triptych:gateway_processes", "Gateways whose metrics these are the sum of.", "gauge")
    processes.add_sample(processes.name, {}, count)
    return generate_latest(_Families([*families.values(), processes]))
