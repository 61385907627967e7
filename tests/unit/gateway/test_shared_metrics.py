"""The sum of several gateways' metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from gateway.metrics import merged


def text(requests: int, under_way: int, up: int, seconds: float) -> bytes:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Counter("http_requests", "Requests.", ("status",), registry=registry).labels("200").inc(requests)
    Gauge("triptych:gateway_http_requests_in_flight", "Under way.", registry=registry).set(under_way)
    Gauge("triptych:gateway_scheduler_up", "Up.", registry=registry).set(up)
    Histogram("latency_seconds", "Latency.", registry=registry, buckets=(1, 2)).observe(seconds)
    return generate_latest(registry)


def lines(found: bytes) -> set[str]:
    return {
        line for line in found.decode().splitlines() if not line.startswith("#") and "_created" not in line
    }


def test_counts_are_added_up() -> None:
    """Counters, gauges and histograms are sums without figures of one process; a flag is set if any is."""
    assert lines(merged([text(3, 1, 0, 0.5), text(4, 2, 1, 1.5)])) == {
        'http_requests_total{status="200"} 7.0',
        "triptych:gateway_http_requests_in_flight 3.0",
        "triptych:gateway_scheduler_up 1.0",
        'latency_seconds_bucket{le="1.0"} 1.0',
        'latency_seconds_bucket{le="2.0"} 2.0',
        'latency_seconds_bucket{le="+Inf"} 2.0',
        "latency_seconds_count 2.0",
        "latency_seconds_sum 2.0",
        "triptych:gateway_processes 2.0",
    }


def test_kinds_and_texts_stay() -> None:
    """Scrapes see the same families as from one gateway."""
    one = [line for line in text(3, 1, 1, 0.5).decode().splitlines() if line.startswith("#")]
    both = merged([text(3, 1, 1, 0.5), text(4, 2, 1, 1.5)]).decode().splitlines()
    missing = [line for line in one if " process_" not in line and line not in both]
    assert not missing
