"""What `triptych bench` measured, with the names, meanings and table lines of `vllm bench serve`."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from statistics import fmean, median, pstdev
from typing import Any, Final

from deploy.client.load import Outcome

_TIMES: Final = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
}
_WIDTH: Final = 50


def figures(outcomes: Sequence[Outcome], duration_s: float) -> dict[str, Any]:
    """Returns all figures by vLLM's names. Times are in milliseconds; failed requests count only as failed.

    Args:
        outcomes: of all requests.
        duration_s: from the first request to the last answer.
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
    long = [each for each in good if each.num_output_tokens > 1]
    times = {
        "ttft": [each.ttft_s for each in good],
        "tpot": [(each.latency_s - each.ttft_s) / (each.num_output_tokens - 1) for each in long],
        "itl": [second - first for each in good for first, second in pairwise(each.arrivals_s)],
    }
    for name, values in times.items():
        shown = [value * 1000 for value in values] or [0.0]
        result[f"mean_{name}_ms"] = fmean(shown)
        result[f"median_{name}_ms"] = median(shown)
        result[f"std_{name}_ms"] = pstdev(shown)
        result[f"p99_{name}_ms"] = percentile(shown, 0.99)
    return result


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
    add("Output token throughput (tok/s)", result["output_throughput"])
    add("Peak output token throughput (tok/s)", result["max_output_tokens_per_s"])
    add("Peak concurrent requests", float(result["max_concurrent_requests"]))
    add("Total token throughput (tok/s)", result["total_token_throughput"])
    for name, (short, header) in _TIMES.items():
        lines.append(header.center(_WIDTH, "-"))
        for word in ("Mean", "Median", "P99"):
            add(f"{word} {short} (ms)", result[f"{word.lower()}_{name}_ms"])
    return "\n".join([*lines, "=" * _WIDTH])
