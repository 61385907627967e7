"""Gaps and times to first tokens, with targets and without, in virtual time: an 8B model on an H100."""

from typing import Any

import pytest

from scheduler_svc.simulation.requests import SimulatedRequest
from scheduler_svc.simulation.step_times import StepTimes
from tests.support.scheduler.simulated import H100_8B, poisson, simulated

CHUNK_S, STEP_S = H100_8B.chunk(512), H100_8B.decode(64)


def p99_of(figures: dict[str, Any], name: str, tenant: str) -> float:
    value: float = figures["tenants"][tenant][name]["p99"]
    return value


def beside_streams(prompt_tokens: int, **settings: Any) -> dict[str, Any]:
    """Sixteen streams run when a prompt arrives."""
    streams = [SimulatedRequest(0.0, 100, 300, tenant="streams") for _ in range(16)]
    return simulated([*streams, SimulatedRequest(1.0, prompt_tokens, 5, tenant="late")], **settings)


# ---- the time between two tokens ----


def test_chunks_are_as_large_as_the_gap_target_allows() -> None:
    """A whole chunk and a step take 27.6 ms: with 25 ms, chunks of 256 and 128 tokens share a gap."""
    requests = poisson(16, 100, 1000, 200)
    without, with_target = (simulated(requests, itl_target_ms=target) for target in (0.0, 25.0))
    assert without["gap_s"]["p99"] == pytest.approx(CHUNK_S + STEP_S)
    assert 0.020 < with_target["gap_s"]["p99"] <= 0.025
    assert with_target["ttft_s"]["p50"] < 0.6


def test_a_compiled_chunk_that_fits_the_gap_target_costs_little() -> None:
    """432 tokens and a step take 24.4 ms: first tokens come nearly as soon as without a target."""
    requests = poisson(16, 100, 1000, 200)
    shapes: dict[str, Any] = {"prefill_buckets": (144, 432), "max_num_batched_tokens": 432, "block_size": 16}
    fitting = simulated(requests, itl_target_ms=25.0, **shapes)
    assert fitting["gap_s"]["p99"] <= 0.025
    assert fitting["ttft_s"]["p50"] <= simulated(requests)["ttft_s"]["p50"] * 1.3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "gap_ms", "ttft_s"),
    [
        ({}, 27.6, 0.35),
        ({"itl_target_ms": 25.0}, 23.6, 1.2),
        ({"itl_target_ms": 25.0, "prefill_buckets": (64, 128, 256, 384, 512)}, 23.6, 0.64),
        (
            {"itl_target_ms": 25.0, "prefill_buckets": (144, 432), "max_num_batched_tokens": 432, "block_size": 16},
            24.4, 0.42,
        ),
    ],
    ids=["no target", "25 ms", "five buckets", "a bucket that fits"],
)  # fmt: skip
def test_the_documented_figures_hold(settings: dict[str, Any], gap_ms: float, ttft_s: float) -> None:
    """Those of docs/scheduling.md."""
    figures = simulated(poisson(16, 400, 1000, 200), **settings)
    assert figures["gap_s"]["p99"] * 1000 == pytest.approx(gap_ms, abs=0.1)
    assert figures["ttft_s"]["p50"] == pytest.approx(ttft_s, rel=0.03)


def test_a_target_that_no_chunk_keeps_lets_the_smallest_run() -> None:
    figures = beside_streams(1024, itl_target_ms=1.0)
    assert figures["gap_s"]["p99"] == pytest.approx(2 * STEP_S)
    assert figures["requests"] == 17


def test_chunks_stay_whole_where_the_worker_needs_that() -> None:
    times = H100_8B.model_copy(update={"chunk_starts": "whole"})
    figures = beside_streams(8000, times=times, itl_target_ms=15.0)
    assert p99_of(figures, "gap_s", "streams") == pytest.approx(CHUNK_S + STEP_S)


# ---- the time to the first token ----


@pytest.mark.parametrize("target_s", [0.36, 0.4, 0.42])
def test_a_prompt_that_would_miss_its_target_runs_at_once(target_s: float) -> None:
    """8,000 tokens take 0.34 s alone and 0.44 s in turns with decode steps."""
    assert p99_of(beside_streams(8000), "ttft_s", "late") > 0.43
    figures = beside_streams(8000, ttft_target_ms=target_s * 1000)
    assert p99_of(figures, "ttft_s", "late") <= target_s


def test_a_prompt_with_time_left_takes_turns() -> None:
    figures = beside_streams(8000, ttft_target_ms=1000.0)
    assert figures == beside_streams(8000)


def test_prompts_that_have_missed_their_target_do_not_stop_the_streams() -> None:
    """Thirty prompts of 8,000 tokens at once cannot all have their first token within 0.2 s."""
    burst = [SimulatedRequest(1.0, 8000, 5) for _ in range(30)]
    figures = simulated([SimulatedRequest(0.0, 100, 500, tenant="stream"), *burst], ttft_target_ms=200.0)
    assert p99_of(figures, "gap_s", "stream") <= CHUNK_S + 2 * STEP_S


# ---- long prompts beside short ones ----


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"itl_target_ms": 25.0}, {"ttft_target_ms": 200.0}], ids=str)
def test_many_long_prompts_of_a_tenant_do_not_hold_up_another(settings: dict[str, Any]) -> None:
    """Sixty prompts of 8,000 tokens are queued when short ones arrive, a second apart."""
    long = [SimulatedRequest(0.0, 8000, 100, tenant="a") for _ in range(60)]
    short = [SimulatedRequest(1.0 + second, 100, 50, tenant="b") for second in range(8)]
    figures = simulated([*long, *short], **settings)
    assert p99_of(figures, "ttft_s", "b") <= 0.1
    # Sixty prompts in a row, with a decode step after each chunk.
    assert p99_of(figures, "ttft_s", "a") <= 32.0


def test_a_very_long_prompt_holds_short_ones_for_a_few_chunks() -> None:
    requests = [
        *poisson(20, 200, 100, 100, tenant="short"),
        SimulatedRequest(3.0, 30_000, 10, tenant="long"),
    ]
    figures = simulated(requests)
    assert p99_of(figures, "ttft_s", "short") <= 4 * (CHUNK_S + STEP_S)
    assert p99_of(figures, "ttft_s", "long") <= 3.0


@pytest.mark.parametrize("before", [1, *(pytest.param(count, marks=pytest.mark.slow) for count in (0, 2, 3))])
def test_short_prompts_do_not_hold_a_long_one_for_ever(before: int) -> None:
    """Short ones arrive faster than they can be computed: every fourth chunk is the long one's all the same.

    It does not matter how many chunks came before.
    """
    short = [SimulatedRequest(index * 0.009, 100, 3, tenant="short") for index in range(500)]
    earlier = [SimulatedRequest(-1.0, 100, 1, tenant="short") for _ in range(before)]
    requests = [*earlier, *short, SimulatedRequest(0.5, 4096, 2, tenant="long")]
    # Three short chunks and a long one, each before a decode step; it waits a few for its slot.
    turn_s = 3 * 2 * STEP_S + CHUNK_S + STEP_S
    assert p99_of(simulated(requests), "ttft_s", "long") <= (4096 / 512 + 3) * turn_s


# ---- memory ----


@pytest.mark.parametrize(("rate", "prompt_tokens"), [(30.0, 100), (16.0, 1000)], ids=["short", "long"])
def test_small_blocks_are_allocated_little_before_they_are_computed(rate: float, prompt_tokens: int) -> None:
    figures = simulated(poisson(rate, 120, prompt_tokens, 200), block_size=16)
    assert 0 < figures["kv_uncomputed_share"] <= 0.1


def test_uncomputed_blocks_are_those_without_a_computed_token() -> None:
    """A prompt of three blocks, a chunk of two: one block is computed when the second chunk is sent."""
    slow = StepTimes(per_token_s=1.0, max_num_seqs=1, max_num_batched_tokens=16, block_size=8)
    figures = simulated([SimulatedRequest(0.0, 24, 1)], times=slow)
    assert figures["kv_uncomputed_share"] == pytest.approx((3 + 1) / (3 + 3))


# ---- several steps a result ----


def test_tokens_come_together_as_often_as_the_event_interval_says() -> None:
    """Four steps of 6.3 ms fit 30 ms: three gaps of four are empty, and no request ends later."""
    alone = [SimulatedRequest(0.0, 100, 201)]
    at_once, together = (simulated(alone, event_interval_ms=interval) for interval in (0.0, 30.0))
    assert at_once["gap_s"]["p99"] == pytest.approx(STEP_S)
    assert together["gap_s"]["p50"] == 0
    assert together["gap_s"]["p90"] == pytest.approx(4 * STEP_S)
    for name in ("latency_s", "tokens_per_s"):
        assert together[name] == pytest.approx(at_once[name])
