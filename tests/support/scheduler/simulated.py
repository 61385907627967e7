"""Simulations for tests of policies: requests against settings, in virtual time."""

import random
from collections.abc import Sequence
from typing import Any

from scheduler_svc.settings import Settings
from scheduler_svc.simulation.requests import SimulatedRequest
from scheduler_svc.simulation.run import simulate
from scheduler_svc.simulation.step_times import StepTimes

H100_8B = StepTimes.read("h100-8b")
"""0.8 ms + max(5.5 ms, 0.04 ms a token); chunks of 512, 64 slots."""


def simulated(
    requests: Sequence[SimulatedRequest],
    *,
    times: StepTimes | Sequence[StepTimes] = H100_8B,
    replicas: int = 1,
    **settings: Any,
) -> dict[str, Any]:
    """Runs requests and returns the figures; ``settings`` are fields of the scheduler's.

    The figures are those of `triptych simulate --json`, for example ``["tenants"]["b"]["ttft_s"]["p50"]``.
    """
    in_order = sorted(requests, key=lambda request: request.arrival_s)
    return simulate(in_order, Settings(**settings), times, replicas=replicas)


def poisson(
    rate: float, count: int, prompt_tokens: int, output_tokens: int, *, start_s: float = 0.0, seed: int = 1,
    **fields: Any,
) -> list[SimulatedRequest]:  # fmt: skip
    """Returns requests that arrive at random, ``rate`` a second; ``fields`` are those of each request."""
    dice, now, requests = random.Random(seed), start_s, []
    for _ in range(count):
        now += dice.expovariate(rate)
        requests.append(SimulatedRequest(now, prompt_tokens, output_tokens, **fields))
    return requests
