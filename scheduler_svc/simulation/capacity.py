"""How many requests a second a deployment carries."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from protos.errors import ConfigurationRefused
from scheduler_svc.simulation.requests import SimulatedRequest, retimed, split_turns

STEADY_S: Final = 60.0
"""Seconds of traffic after which a queue that grows is long enough to break a limit."""
_PRECISION: Final = 0.02
_MOST_DOUBLINGS: Final = 24

Simulate = Callable[[Sequence[SimulatedRequest]], dict[str, Any]]
Limits = Mapping[tuple[str, str], float]
"""Most seconds, by name and percentile of a figure, such as ``("ttft_s", "p99")``."""


def carries(figures: Mapping[str, Any], limits: Limits) -> bool:
    """Returns whether no request was rejected and every limit is kept."""
    return not figures["rejected"] and all(
        figures[name][part] <= most for (name, part), most in limits.items()
    )


def find_rate(
    requests: Sequence[SimulatedRequest],
    simulate: Simulate,
    limits: Limits,
    tried: Callable[[float, bool], None],
) -> tuple[float, dict[str, Any]]:
    """Returns the highest rate at which a deployment carries the requests, and the figures there.

    The requests stay the same; only the times between their arrivals are scaled. Pauses inside sessions stay.

    Args:
        requests: the trace.
        simulate: runs requests; returns the figures.
        limits: bounds of the figures; no request may be rejected, either.
        tried: called with each rate, requests a second, and whether it is carried.

    Raises:
        ConfigurationRefused: the trace has no rate, no rate is carried, or any is.
    """
    span_s = split_turns(requests)[0][-1].arrival_s
    if not span_s:
        raise ConfigurationRefused("--find rate needs requests that arrive at different times")
    own_rate = len(requests) / span_s

    def run(rate: float) -> dict[str, Any] | None:
        figures = simulate(retimed(requests, lambda arrival_s: arrival_s * own_rate / rate))
        carried = carries(figures, limits)
        tried(rate, carried)
        return figures if carried else None

    low = high = own_rate
    best = run(own_rate)
    for _ in range(_MOST_DOUBLINGS):
        if best is None:
            low, high = low / 2, low
            best = run(low)
        elif (more := run(high := low * 2)) is not None:
            low, best = high, more
            continue
        if best is not None:
            break
    else:
        raise ConfigurationRefused(
            "no rate is carried: even requests that come one at a time exceed the limits"
            if best is None else "every rate is carried: the trace is too short to show a limit"
        )  # fmt: skip
    while high / low > 1 + _PRECISION:
        middle = (low * high) ** 0.5
        if (figures := run(middle)) is None:
            high = middle
        else:
            low, best = middle, figures
    return low, best
