"""Placement in seconds, in virtual time, against placement by load alone and by cached prefixes alone."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from scheduler_svc.dispatch.placement import AttachedReplica, Placer
from scheduler_svc.requests.request import Request
from scheduler_svc.simulation.requests import SimulatedRequest
from tests.support.scheduler.simulated import H100_8B, poisson, simulated

Free = list[AttachedReplica]


def by_load(_: Placer, request: Request, free: Free) -> Free:
    def load(replica: AttachedReplica) -> tuple[int, int]:
        scheduler = replica.scheduler
        return scheduler.num_running + scheduler.num_deferred, -scheduler.cached_tokens(request)

    return sorted(free, key=load)


def by_prefix(_: Placer, request: Request, free: Free) -> Free:
    def hit(replica: AttachedReplica) -> tuple[int, int]:
        return -replica.scheduler.cached_tokens(request), replica.scheduler.num_running

    return sorted(free, key=hit)


def with_systems(requests: Sequence[SimulatedRequest], count: int) -> list[SimulatedRequest]:
    """Returns the requests, each with one of so many system prompts of 2,000 tokens and its own output."""
    dice = random.Random(7)
    return [
        replace(
            one,
            prompt_tokens=2000 + one.prompt_tokens,
            output_tokens=dice.randint(200, 400),
            prefix=[(f"system-{dice.randrange(count)}", 2000)],
        )
        for one in requests
    ]


def bursts() -> list[SimulatedRequest]:
    """Returns requests of which 24 at a time arrive together."""
    crowd = [SimulatedRequest(index // 24 * 2.0, 100, 0) for index in range(240)]
    return with_systems(crowd, 3)


def conversations() -> list[SimulatedRequest]:
    """Returns the turns of conversations, each of which contains the turns before it."""
    dice, turns = random.Random(1), []
    for begun in poisson(6, 100, 0, 0):
        pieces, at_s = [("system", 500)], begun.arrival_s
        for turn in range(dice.randint(1, 9)):
            pieces.append((f"{begun.arrival_s}/{turn}", dice.randint(50, 400)))
            size, output = sum(count for _, count in pieces), dice.randint(50, 250)
            turns.append(SimulatedRequest(at_s, size, output, tuple(pieces)))
            pieces.append((f"{begun.arrival_s}/{turn} answer", output))
            at_s += output * 0.01 + dice.expovariate(1 / 3)
    return turns


@pytest.mark.parametrize(
    "trace",
    [
        pytest.param(lambda: with_systems(poisson(12, 250, 100, 0), 1), id="one system prompt"),
        pytest.param(lambda: with_systems(poisson(12, 400, 100, 0), 8), id="eight", marks=pytest.mark.slow),
        pytest.param(lambda: with_systems(poisson(12, 600, 100, 0), 40), id="forty", marks=pytest.mark.slow),
        pytest.param(lambda: with_systems(poisson(24, 600, 100, 0), 3), id="busy", marks=pytest.mark.slow),
        pytest.param(lambda: with_systems(poisson(3, 200, 100, 0), 1), id="quiet", marks=pytest.mark.slow),
        pytest.param(bursts, id="bursts", marks=pytest.mark.slow),
        pytest.param(conversations, id="conversations", marks=pytest.mark.slow),
    ],
)
def test_placement_is_as_fast_as_even_load_and_hits_as_often_as_affinity(
    trace: Callable[[], list[SimulatedRequest]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latency is within 5 % of placement by load, hits within two points of placement by prefix."""
    requests = trace()

    def figures(order: Callable[[Placer, Request, Free], Free] = Placer.by_cost) -> dict[str, Any]:
        monkeypatch.setattr(Placer, "by_cost", order)
        return simulated(requests, replicas=4)

    ours, even, affine = figures(), figures(by_load), figures(by_prefix)
    assert ours["latency_s"]["p50"] <= 1.05 * even["latency_s"]["p50"]
    assert ours["prefix_hit_share"] >= affine["prefix_hit_share"] - 0.02


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
