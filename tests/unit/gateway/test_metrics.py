"""Metrics of one gateway and of several."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from gateway.metrics import _INTER_TOKEN, Metrics, merged
from protos.service.backpressure import UnreadLimits

GAPS = [0.0, 0.01, 0.010001, 0.3, 79.9, 80.0, 1e9]


def make_metrics(*, longest: int = 1000) -> Metrics:
    return Metrics(
        lambda: "m",
        lambda: 0,
        lambda: 0,
        lambda: False,
        UnreadLimits(per_reader=9, total=9, flags=("", "")),
        lambda: 0,
        lambda: longest,
    )


def lines(text: bytes, name: str) -> list[str]:
    """Returns the samples of a metric but the time of its creation."""
    return [
        line
        for line in text.decode().splitlines()
        if line.startswith((name, f"# HELP {name}", f"# TYPE {name}"))
        and "_created" not in line
        and 'engine=""' not in line
    ]


def test_gaps_between_tokens_are_a_histogram_like_any_other() -> None:
    """Bounds belong to the bucket below them, and buckets include the ones below."""
    name = "vllm:inter_token_latency_seconds"
    registry = CollectorRegistry()
    peer = Histogram(
        name,
        "Time between tokens of a sequence.",
        ("model_name", "engine"),
        buckets=_INTER_TOKEN,
        registry=registry,
    ).labels("m", "r0")
    metrics = make_metrics()
    for gap in GAPS:
        metrics.engine("r0").tokens(1, gap)
        peer.observe(gap)
    assert lines(metrics.text(), name) == lines(generate_latest(registry), name)


def test_tokens_that_come_together_each_have_a_part_of_the_gap() -> None:
    """Four tokens after 0.4 s are four gaps of 0.1 s."""
    metrics = make_metrics()
    metrics.engine("r0").tokens(4, 0.4)
    text = metrics.text().decode()
    assert 'inter_token_latency_seconds_bucket{engine="r0",le="0.1",model_name="m"} 4.0' in text


def test_bounds_of_tokens_end_at_the_longest_sequence() -> None:
    metrics = make_metrics(longest=40)
    metrics.engine("r0").finished("stop", 1.0, prompt=9, generated=3)
    bounds = [
        line.partition('le="')[2].partition('"')[0]
        for line in lines(metrics.text(), "vllm:request_prompt_tokens_bucket")
    ]
    assert bounds == ["1.0", "2.0", "5.0", "10.0", "20.0", "+Inf"]


def test_engines_of_long_ago_share_one_series() -> None:
    metrics = make_metrics()
    for index in range(200):
        metrics.engine(f"w{index}").finished("stop", 1.0, prompt=1)
    found = lines(metrics.text(), "vllm:request_success_total{")
    stopped = [line for line in found if 'finished_reason="stop"' in line]
    assert len(stopped) <= 65
    assert sum(float(line.split()[-1]) for line in stopped) == 200


def text(requests: int, under_way: int, up: int, seconds: float) -> bytes:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Counter("http_requests", "Requests.", ("status",), registry=registry).labels("200").inc(requests)
    Gauge("triptych:gateway_http_requests_in_flight", "Under way.", registry=registry).set(under_way)
    Gauge("triptych:gateway_scheduler_up", "Up.", registry=registry).set(up)
    Gauge("triptych:gateway_certificate_days_left", "Days.", registry=registry).set(30 - requests)
    Histogram("latency_seconds", "Latency.", registry=registry, buckets=(1, 2)).observe(seconds)
    return generate_latest(registry)


def samples(found: bytes) -> set[str]:
    return {
        line for line in found.decode().splitlines() if not line.startswith("#") and "_created" not in line
    }


def test_counts_are_added_up() -> None:
    """Counters, gauges and histograms are sums without figures of one process; a flag is set if any is."""
    assert samples(merged([text(3, 1, 0, 0.5), text(4, 2, 1, 1.5)])) == {
        'http_requests_total{status="200"} 7.0',
        "triptych:gateway_http_requests_in_flight 3.0",
        "triptych:gateway_scheduler_up 1.0",
        "triptych:gateway_certificate_days_left 26.0",
        'latency_seconds_bucket{le="1.0"} 1.0',
        'latency_seconds_bucket{le="2.0"} 2.0',
        'latency_seconds_bucket{le="+Inf"} 2.0',
        "latency_seconds_count 2.0",
        "latency_seconds_sum 2.0",
        "triptych:gateway_processes 2.0",
    }


def test_kinds_and_texts_stay() -> None:
    one = [line for line in text(3, 1, 1, 0.5).decode().splitlines() if line.startswith("#")]
    both = merged([text(3, 1, 1, 0.5), text(4, 2, 1, 1.5)]).decode().splitlines()
    missing = [line for line in one if " process_" not in line and line not in both]
    assert not missing
