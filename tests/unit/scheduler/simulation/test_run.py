"""Simulations whose figures follow from a few numbers."""

import pytest

from protos.errors import ConfigurationRefused
from scheduler_svc.simulation.requests import GENERATED, SimulatedRequest
from scheduler_svc.simulation.step_times import StepTimes
from tests.support.scheduler.simulated import poisson, simulated

# A chunk of 8 tokens takes 8 s, a decode step of one row 1 s.
SLOW = StepTimes(per_token_s=1.0, max_num_seqs=2, max_num_batched_tokens=8, block_size=8)


def test_figures_of_one_request() -> None:
    figures = simulated([SimulatedRequest(1.5, 12, 3)], times=SLOW)
    assert figures["ttft_s"] == {"p50": 16.0, "p90": 16.0, "p99": 16.0, "mean": 16.0}  # two padded chunks
    assert figures["gap_s"]["p50"] == figures["gap_s"]["mean"] == pytest.approx(1.0)
    assert figures["latency_s"]["p50"] == pytest.approx(18.0)
    assert figures["tokens_per_s"] == pytest.approx(3 / 18)
    assert figures["requests_by_replica"] == [1]
    assert figures["utilization"] == pytest.approx(1.0)
    assert figures["padding_share"] == pytest.approx(4 / 18)
    assert figures["prefix_hit_share"] == figures["preemptions"] == figures["rejected"] == 0


def test_requests_share_named_pieces_and_generated_tokens() -> None:
    piece = (("system", 16),)
    first, second = SimulatedRequest(0.0, 20, 8, piece), SimulatedRequest(100.0, 20, 8, piece)
    assert simulated([first, second], times=SLOW)["prefix_hit_share"] == pytest.approx(16 / 40)
    # The second turn repeats the first prompt, its own 4 tokens included, and the answer.
    turns = [
        SimulatedRequest(0.0, 20, 13, (("a", 20),), session="s"),
        SimulatedRequest(5.0, 36, 1, (("a", 20), (GENERATED, 12), ("b", 4)), session="s"),
    ]
    figures = simulated(turns, times=SLOW, cache_generated_tokens=True)
    assert figures["prefix_hit_share"] == pytest.approx(32 / 56)
    assert figures["span_s"] == pytest.approx(24 + 12 + 5 + 8)


def test_tenants_have_figures_of_their_own() -> None:
    requests = poisson(0.1, 20, 8, 4, tenant="a") + poisson(0.1, 10, 8, 4, tenant="b", seed=2)
    figures = simulated(requests, times=SLOW, replicas=2)
    assert {name: one["requests"] for name, one in figures["tenants"].items()} == {"a": 20, "b": 10}
    assert sum(figures["requests_by_replica"]) == 30
    for name in ("tokens_per_s", "preemptions"):
        assert sum(one[name] for one in figures["tenants"].values()) == pytest.approx(figures[name])


def test_scarce_blocks_preempt_and_a_full_queue_rejects() -> None:
    requests = [SimulatedRequest(0.0, 8, 40) for _ in range(6)]
    figures = simulated(requests, times=SLOW, num_blocks=9, max_waiting_requests=2)
    assert figures["preemptions"] > 0
    assert figures["rejected"] > 0
    assert figures["requests"] + figures["rejected"] == 6


def test_a_request_that_no_replica_can_hold_is_refused() -> None:
    with pytest.raises(ConfigurationRefused, match=r"arrives at 3 s: .*maximum context length"):
        simulated([SimulatedRequest(3.0, 100, 10)], times=SLOW, num_blocks=5)


def test_a_worker_does_not_delay_a_prompt_by_a_whole_lease() -> None:
    times = StepTimes(base_s=1.0, max_num_batched_tokens=8, block_size=8)
    requests = [SimulatedRequest(0.0, 8, 50), SimulatedRequest(10.5, 8, 1, tenant="late")]
    assert simulated(requests, times=times)["tenants"]["late"]["ttft_s"]["p50"] <= 2.5
