"""20,000 draws per case follow the exact distribution, for each parameter and for all of them together."""

import pytest
import torch

from tests.support.sampling_params import complete_params
from tests.support.worker.sampling import chi_square_p, draw_many, expected_logits, expected_probabilities

DRAWS = 20_000
VOCAB = 200
PROMPT = (3, 7, 7, 20, 41)
OUTPUT = (5, 7, 5, 5, 60, 61)

ALL = {
    "temperature": 0.8, "top_p": 0.92, "top_k": 40, "min_p": 0.01, "presence_penalty": 0.7, "frequency_penalty": 0.4,
    "repetition_penalty": 1.3, "logit_bias": {1: 2.5, 5: 1.0, 90: -3.0}, "allowed_token_ids": tuple(range(150)),
    "bad_words": ((17,), (60, 61, 12), (61, 13), (5, 14)),
}  # fmt: skip
CASES = {
    "plain": {},
    "temperature_low": {"temperature": 0.5},
    "temperature_high": {"temperature": 2.5},
    "top_k_1": {"top_k": 1},
    "top_k": {"top_k": 20},
    "top_p_low": {"top_p": 0.3},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "presence": {"presence_penalty": 1.5},
    "presence_negative": {"presence_penalty": -1.5},
    "frequency": {"frequency_penalty": 0.9},
    "frequency_negative": {"frequency_penalty": -0.8},
    "repetition": {"repetition_penalty": 1.8},
    "repetition_below_1": {"repetition_penalty": 0.6},
    "logit_bias": {"logit_bias": {2: 4.0, 5: -2.0, 199: 3.0}},
    "allowed": {"allowed_token_ids": (5, 31, 32, 63, 64, 199)},
    "bad_words": {"bad_words": ((60, 61, 12), (61, 13), (5, 14), (60, 15))},
    "filters": {"temperature": 1.3, "top_p": 0.9, "top_k": 50, "min_p": 0.02},
    "top_k_and_top_p": {"top_k": 30, "top_p": 0.7},
    "top_p_and_min_p": {"top_p": 0.8, "min_p": 0.1},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "bias_and_penalties": {"logit_bias": {5: 3.0}, "repetition_penalty": 1.5, "frequency_penalty": 0.3},
    "all": ALL,
}  # fmt: skip
KINDS = ("float32", "bfloat16", "peaked")
# Quick tests give each case one kind of logits in turn, and all of them to the case of all parameters.
GRID = [
    pytest.param(case, kind, marks=() if case == "all" or row % 3 == column else pytest.mark.slow)
    for row, case in enumerate(CASES)
    for column, kind in enumerate(KINDS)
]


def logits_of(kind: str) -> torch.Tensor:
    """Returns logits, float32 [vocab]: arbitrary, with bfloat16's few values, or peaked like a model's."""
    noise = torch.randn(VOCAB, generator=torch.Generator().manual_seed(11))
    if kind == "bfloat16":
        return (noise * 2).bfloat16().float()
    return noise * (3 if kind == "peaked" else 1)


@pytest.mark.parametrize(("case", "kind"), GRID)
def test_draws_follow_the_exact_distribution(case: str, kind: str) -> None:
    """A chi-square test of the counts at p = 1e-4, with fixed seeds."""
    sampling = complete_params(**CASES[case])  # type: ignore[arg-type]
    logits = logits_of(kind)
    exact = expected_probabilities(expected_logits(logits, sampling, PROMPT, OUTPUT), sampling)
    drawn = draw_many(logits, sampling, DRAWS, prompt=PROMPT, output=OUTPUT)
    assert chi_square_p(drawn, exact) > 1e-4


def test_the_test_detects_a_wrong_temperature() -> None:
    """Draws at temperature 1 do not pass as draws at 1.05."""
    logits = logits_of("peaked")
    drawn = draw_many(logits, complete_params(), DRAWS)
    wrong = expected_probabilities(logits.tolist(), complete_params(temperature=1.05))
    assert chi_square_p(drawn, wrong) < 1e-4
