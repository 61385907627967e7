"""What `triptych bench` measured, with the names, meanings and table lines of `vllm bench serve`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import ceil
from statistics import fmean, median, pstdev
from typing import Any, Final

from deploy.client.load import Outcome

METRICS: Final = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
"""The times that can be shown: name, abbreviation and heading."""
_WIDTH: Final = 50


def figures(
    outcomes: Sequence[Outcome],
    duration_s: float,
    *,
    metrics: Sequence[str] = ("ttft", "tpot", "itl"),
    percentiles: Sequence[str] = ("99",),
    objectives: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Returns all figures by vLLM's names. Times are in milliseconds; failed requests count only as failed.

    Args:
        outcomes: of all requests.
        duration_s: from the first request to the last answer.
        metrics: the times to return, of `METRICS`.
        percentiles: of these times, as people write them: "99", "99.9".
        objectives: the most milliseconds of some times that a request may take to count as good.
    """
    good = [each for each in outcomes if not each.error]
    num_input = sum(each.num_prompt_tokens for each in good)
    num_output = sum(each.num_output_tokens for each in good)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        **_peaks(good),
    }
    if objectives:
        result["request_goodput"] = sum(_meets(each, objectives) for each in good) / duration_s
    times = {
        "ttft": [each.ttft_s for each in good],
        "tpot": [_tpot_s(each) for each in good if each.num_output_tokens > 1],
        "itl": [second - first for each in good for first, second in pairwise(each.arrivals_s)],
        "e2el": [each.latency_s for each in good],
    }
    for name in METRICS:
        if name not in metrics:
            continue
        shown = [value * 1000 for value in times[name]] or [0.0]
        result[f"mean_{name}_ms"] = fmean(shown)
        result[f"median_{name}_ms"] = median(shown)
        result[f"std_{name}_ms"] = pstdev(shown)
        for word in percentiles:
            result[f"p{word}_{name}_ms"] = percentile(shown, float(word) / 100)
    return result


def _tpot_s(outcome: Outcome) -> float:
    """Returns the time per token after the first, and 0 for an answer of at most one token, as vLLM does."""
    if outcome.num_output_tokens <= 1:
        return 0.0
    return (outcome.latency_s - outcome.ttft_s) / (outcome.num_output_tokens - 1)


def _meets(outcome: Outcome, objectives: Mapping[str, float]) -> bool:
    taken = {"ttft": outcome.ttft_s, "tpot": _tpot_s(outcome), "e2el": outcome.latency_s}
    return all(taken[name] * 1000 <= limit for name, limit in objectives.items())


def percentile(values: Sequence[float], fraction: float) -> float:
    """Returns a percentile, interpolated between neighbours as numpy does."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    below, above = ordered[int(place)], ordered[ceil(place)]
    return below + (above - below) * (place - int(place))


def _peaks(good: Sequence[Outcome]) -> dict[str, float]:
    """Returns the most chunks, and the most requests under way, in one second of the run."""
    if not good:
        return {"max_output_tokens_per_s": 0.0, "max_concurrent_requests": 0}
    first = min(each.started_s for each in good)
    chunks = Counter(int(arrival - first) for each in good for arrival in each.arrivals_s)
    running = Counter(
        second
        for each in good
        for second in range(int(each.started_s - first), int(each.arrivals_s[-1] - first) + 1)
    )
    return {
        "max_output_tokens_per_s": float(max(chunks.values())),
        "max_concurrent_requests": max(running.values()),
    }


def table(result: dict[str, Any], request_rate: float, max_concurrency: int | None) -> str:
    """Returns the table that `vllm bench serve` prints."""
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]

    def add(label: str, value: float) -> None:
        text = str(value) if isinstance(value, int) else f"{value:.2f}"
        lines.append(f"{label + ':':<40} {text:<10}")

    add("Successful requests", result["completed"])
    add("Failed requests", result["failed"])
    if max_concurrency is not None:
        add("Maximum request concurrency", max_concurrency)
    if request_rate != float("inf"):
        add("Request rate configured (RPS)", request_rate)
    add("Benchmark duration (s)", result["duration"])
    add("Total input tokens", result["total_input_tokens"])
    add("Total generated tokens", result["total_output_tokens"])
    add("Request throughput (req/s)", result["request_throughput"])
    if "request_goodput" in result:
        add("Request goodput (req/s)", result["request_goodput"])
    add("Output token throughput (tok/s)", result["output_throughput"])
    add("Peak output token throughput (tok/s)", result["max_output_tokens_per_s"])
    add("Peak concurrent requests", float(result["max_concurrent_requests"]))
    add("Total token throughput (tok/s)", result["total_token_throughput"])
    for name, (short, header) in METRICS.items():
        words = [key.removesuffix(f"_{name}_ms") for key in result if key.endswith(f"_{name}_ms")]
        if words:
            lines.append(header.center(_WIDTH, "-"))
        for word in words:
            if word != "std":
                add(f"{word.capitalize()} {short} (ms)", result[f"{word}_{name}_ms"])
    return "\n".join([*lines, "=" * _WIDTH])
