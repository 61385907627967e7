"""The gateway's own metrics of tokens, which are counted without prometheus_client's locks."""

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from gateway.metrics import _INTER_TOKEN, Metrics
from gateway.scheduler_link.request_table import unread_limits

GAPS = [0.0, 0.01, 0.010001, 0.3, 79.9, 80.0, 1e9]


def lines(text: bytes, name: str) -> list[str]:
    """Returns the samples of a metric but the time of its creation."""
    return [
        line
        for line in text.decode().splitlines()
        if line.startswith((name, f"# HELP {name}", f"# TYPE {name}")) and "_created" not in line
    ]


def test_gaps_between_tokens_are_a_histogram_like_any_other() -> None:
    """Bounds belong to the bucket below them, and buckets include the ones below."""
    name = "vllm:inter_token_latency_seconds"
    registry = CollectorRegistry()
    peer = Histogram(
        name, "Time between tokens of a sequence.", ("model_name",), buckets=_INTER_TOKEN, registry=registry
    ).labels("m")
    metrics = Metrics(lambda: "m", lambda: 0, lambda: 0, unread_limits())
    metrics.first_token(1, 0.5)
    for gap in GAPS:
        metrics.tokens(1, gap)
        peer.observe(gap)
    assert lines(metrics.text(), name) == lines(generate_latest(registry), name)


def test_tokens_count_for_the_model_that_generated_them() -> None:
    """Another model's name may follow, and a scrape counts nothing twice."""
    served = "one"
    metrics = Metrics(lambda: served, lambda: 0, lambda: 0, unread_limits())
    metrics.first_token(3, 0.5)
    metrics.tokens(4, 0.1)
    served = "two"
    metrics.first_token(5, 0.5)
    for _ in range(2):
        assert lines(metrics.text(), "vllm:generation_tokens_total{") == [
            'vllm:generation_tokens_total{model_name="one"} 7.0',
            'vllm:generation_tokens_total{model_name="two"} 5.0',
        ]
