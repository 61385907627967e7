"""The figures of `triptych bench` for known times."""

from itertools import pairwise

import pytest

from deploy.client.figures import METRICS, figures, percentile, table
from deploy.client.load import Outcome


def outcomes() -> list[Outcome]:
    """Four answers with known times, and a failure."""
    return [
        Outcome(10, 0.0, [0.5, 0.6, 0.8], 3),
        Outcome(20, 0.2, [0.3, 1.3], 2),
        Outcome(30, 1.0, [1.1], 1),
        Outcome(5, 0.5, [0.7, 1.4], 1),
        Outcome(40, 0.0, [0.1], 1, "400: no"),
    ]


def test_figures_are_vllm_s() -> None:
    """Sums leave out failures; TPOT leaves out the first token and answers of one token."""
    found = figures(outcomes(), 2.0)
    assert (found["completed"], found["failed"]) == (4, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (65, 7)
    assert (found["request_throughput"], found["output_throughput"]) == (2.0, 3.5)
    assert found["total_token_throughput"] == 36.0
    # TTFT 500, 100, 100, 200; TPOT 150 and 1000; ITL 100, 200, 1000, 700.
    assert found["mean_ttft_ms"] == pytest.approx(225)
    assert found["median_ttft_ms"] == pytest.approx(150)
    assert found["mean_tpot_ms"] == pytest.approx(575)
    assert found["median_itl_ms"] == pytest.approx(450)
    assert found["p99_itl_ms"] == pytest.approx(991)
    assert (found["max_output_tokens_per_s"], found["max_concurrent_requests"]) == (5.0, 3)


def test_an_answer_of_one_token_meets_every_limit_of_tpot() -> None:
    """However many chunks it has; of two others, one meets the limit."""
    assert figures(outcomes(), 2.0, objectives={"tpot": 200.0})["request_goodput"] == 1.5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # importing vLLM
def test_figures_equal_vllm_s(shared_vllm: None) -> None:
    """The function of vLLM computes the same from the same times."""
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput
    from vllm.benchmarks.serve import calculate_metrics

    peers = []
    for outcome in outcomes():
        peer = RequestFuncOutput(success=not outcome.error, error=outcome.error)
        peer.prompt_len, peer.output_tokens = outcome.num_prompt_tokens, outcome.num_output_tokens
        peer.start_time, peer.ttft, peer.latency = outcome.started_s, outcome.ttft_s, outcome.latency_s
        peer.itl = [late - early for early, late in pairwise(outcome.arrivals_s)]
        peers.append(peer)
    limits = {"ttft": 450.0, "tpot": 200.0, "e2el": 1000.0}
    for objectives in (*({name: limit} for name, limit in limits.items()), limits):
        theirs, _ = calculate_metrics([], peers, 2.0, None, [50.0, 99.9], objectives)
        expected = {"duration": 2.0}
        for name, value in vars(theirs).items():
            if name.startswith("percentiles_"):
                for percent, each in value:
                    expected[name.replace("percentiles", f"p{percent:g}")] = each
            elif name != "rtfx":
                expected[f"{name}_tokens" if name in {"total_input", "total_output"} else name] = value
        ours = figures(
            outcomes(), 2.0, metrics=tuple(METRICS), percentiles=("50", "99.9"), objectives=objectives
        )
        assert ours == pytest.approx(expected)


def test_nothing_that_succeeded_is_no_fault() -> None:
    """All figures are 0, and the table prints."""
    found = figures([Outcome(1, 0.0, error="no")], 1.0)
    assert (found["completed"], found["failed"], found["p99_tpot_ms"]) == (0, 1, 0.0)
    assert "Failed requests:                         1         " in table(found, 2.0, None).splitlines()


def test_percentiles_are_interpolated() -> None:
    """As numpy does it: 99 % of the way from the least to the greatest of 101 values is the hundredth."""
    assert percentile([float(value) for value in range(101)], 0.99) == pytest.approx(99)
    assert percentile([5.0], 0.99) == 5.0
    assert percentile([2.0, 1.0], 0.5) == 1.5
