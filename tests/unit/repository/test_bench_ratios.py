"""The ratios, floors and tables that benches compute from measurements."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.bench import hostile, logprobs
from tests.bench.decode_step import Floor, weight_bytes
from tests.bench.pooling import vs_vllm_embeddings
from tests.bench.support.http_load import Arrivals
from tests.bench.support.step_parts import HEAD, StepParts
from tests.bench.vs_vllm import QUICK_WORKLOADS, ratios, table
from worker_svc.graphs.replay import ATTENTION
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


def test_the_table_has_a_line_for_each_contender() -> None:
    """A dash stands for a missing figure."""
    lines = table(MEASURED, QUICK_WORKLOADS).splitlines()
    assert [line.split() for line in lines if line.startswith("triptych")] == [
        ["triptych", "9.0", "-", "-", "-"],
        ["triptych", "300.0", "200.0", "5.0"],
    ]


def test_the_floor_counts_weights_and_windows() -> None:
    """Weights count once; keys and values count for each row, up to a layer's window."""
    full = AttentionLayer("a", 4, 2, 8, 0, torch.bfloat16)
    window = AttentionLayer("b", 4, 2, 8, 16, torch.bfloat16)
    floor = Floor(bytes_per_s=1e6, weights=1000, layers=(full, window))
    assert full.bytes_per_token == 64
    assert floor.milliseconds([10, 100]) == pytest.approx(1.0 + (64 * (10 + 100) + 64 * (10 + 16)) / 1000)


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_counts_only_as_output_head(tied: bool, tmp_path: Path) -> None:
    """A tied embedding counts, because the output head reads it; an untied input embedding does not."""
    tensors = {"model.embed_tokens.weight": torch.zeros(4, 3), "model.layers.0.up.weight": torch.zeros(8)}
    if not tied:
        tensors["lm_head.weight"] = torch.zeros(4, 3)
    save_file(tensors, tmp_path / "model.safetensors")
    assert weight_bytes(tmp_path, torch.bfloat16) == 2 * (4 * 3 + 8)


def test_the_parts_of_a_step_cover_all_kernels() -> None:
    """Each kernel counts in one part; the output head is a linear layer."""
    parts = StepParts()
    for operator, seconds in (("_C::onednn_mm", 1.0), (HEAD, 2.0), (ATTENTION, 4.0), ("aten::silu", 8.0)):
        parts.add(operator, seconds)
    parts.add("aten::silu", 8.0)
    assert (parts.linear, parts.attention, parts.other) == (3.0, 4.0, 16.0)


def test_a_load_counts_the_tokens_of_its_window() -> None:
    """A chunk counts as many tokens as the answer's chunks hold on average, if it arrived in the window."""
    assert Arrivals((1.0, 2.0, 3.0, 4.0), 1.5).tokens_between(2.0, 4.0) == 3.0
