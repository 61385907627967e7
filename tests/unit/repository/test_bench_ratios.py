"""The ratios, floors and tables that benches compute from measurements."""

import pytest
import torch

from tests.bench import hostile, logprobs
from tests.bench.decode_step import Floor
from tests.bench.pooling import vs_vllm_embeddings
from tests.bench.vs_vllm import ratios
from worker_svc.shapes import AttentionLayer

MEASURED = {
    "vllm": {"tok_s_c8": 100.0, "ttft_c8": 400.0, "tpot_c8": 10.0, "start_cold": 90.0},
    "vllm, all cores": {"tok_s_c8": 200.0, "ttft_c8": 500.0, "tpot_c8": 8.0, "start_cold": 100.0},
    "triptych": {"tok_s_c8": 300.0, "ttft_c8": 200.0, "tpot_c8": 5.0, "start_cold": 9.0},
}


def test_a_ratio_divides_by_the_better_contender() -> None:
    """A ratio divides by the better contender of its figure; a missing figure has no ratio."""
    assert ratios(MEASURED) == {"tok_s_c8": 1.5, "ttft_c8": 0.5, "start_cold": 0.1}


def test_embeddings_are_compared_with_the_better_setting_of_vllm() -> None:
    """The faster one for texts per second, the cheaper one for processor time."""
    rates = vs_vllm_embeddings.Rates
    measured = {
        "vllm": {8: rates(100.0, 30.0)},
        "vllm, all cores": {8: rates(80.0, 20.0)},
        "triptych": {8: rates(150.0, 10.0)},
    }
    assert vs_vllm_embeddings.ratios(measured) == {"texts_per_s_8": 1.5, "cpu_time_8": 0.5}


def test_log_probabilities_are_compared_within_a_round() -> None:
    """A ratio divides by the rate without log-probabilities of the same round; rounds give a median."""
    rates = [{"none": 100.0, "1": 90.0}, {"none": 200.0, "1": 160.0}, {"none": 100.0, "1": 10.0}]
    assert logprobs.ratios(rates) == {"logprobs_1_b32": 0.8}


def test_attacks_are_compared_with_aims() -> None:
    """The worst of all attacks counts, of all processes; the row without an attack is apart."""
    rows = [
        hostile.Row(name, {}, loop_ms, latency_ms, failed, {"gateway": growth, "scheduler": 1.0})
        for name, loop_ms, latency_ms, failed, growth in (
            ("nothing", 900.0, 900.0, 0, 0.0), ("one", 100.0, 250.0, 2, 32.0), ("two", 25.0, 500.0, 1, 128.0),
        )
    ]  # fmt: skip
    figures, ratios = hostile.summary(rows)
    assert ratios == {"loop_ms_to_aim": 2, "latency_ms_to_aim": 1, "growth_mib_to_aim": 2}
    assert figures["within_aim"] == {"loop_ms": 1, "latency_ms": 2, "growth_mib": 1}
    assert figures["refused_to_the_other"] == 3


def test_the_floor_counts_weights_and_windows() -> None:
    """Weights count once; keys and values count for each row, up to a layer's window."""
    full = AttentionLayer("a", 4, 2, 8, 0, torch.bfloat16)
    window = AttentionLayer("b", 4, 2, 8, 16, torch.bfloat16)
    floor = Floor(bytes_per_s=1e6, weights=1000, layers=(full, window))
    assert full.bytes_per_token == 64
    assert floor.milliseconds([10, 100]) == pytest.approx(1.0 + (64 * (10 + 100) + 64 * (10 + 16)) / 1000)
