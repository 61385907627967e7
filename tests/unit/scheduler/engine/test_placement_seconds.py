"""Replicas of different speeds, in virtual time."""

from collections.abc import Sequence
from typing import Any

import pytest

from scheduler_svc.simulation.requests import SimulatedRequest
from tests.support.scheduler.simulated import H100_8B, poisson, simulated


def slowed(factor: float) -> Sequence[Any]:
    """Returns the times of four workers, the last of which is slower."""
    slow = {name: getattr(H100_8B, name) * factor for name in ("base_s", "floor_s", "per_token_s")}
    return [*[H100_8B] * 3, H100_8B.model_copy(update=slow)]


@pytest.mark.parametrize(
    ("rate", "least", "most"),
    [(30, 0, 0.1), pytest.param(120, 0.35, 0.65, marks=pytest.mark.slow)],
    ids=["the others suffice", "they do not"],
)
def test_a_slow_replica_gets_less(rate: float, least: float, most: float) -> None:
    """A replica of half the speed gets half of what others get if it is needed, and else next to none."""
    placed = simulated(poisson(rate, 500, 300, 100), times=slowed(2))["requests_by_replica"]
    assert least <= placed[3] / min(placed[:3]) <= most


def test_a_replica_that_seemed_slow_gets_a_probe_a_minute() -> None:
    """It takes part again after it has recovered, even if the others can carry the load alone."""
    requests = [SimulatedRequest(index * 0.5, 100, 20) for index in range(500)]
    placed = simulated(requests, times=slowed(20))["requests_by_replica"]
    assert 3 <= placed[3] <= 6


def test_requests_before_the_first_result_spread_evenly() -> None:
    """Nothing is known of any replica yet."""
    requests = [SimulatedRequest(0.0, 300, 20) for _ in range(40)]
    assert simulated(requests, replicas=4)["requests_by_replica"] == [10] * 4
