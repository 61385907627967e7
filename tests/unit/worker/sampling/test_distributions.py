"""20,000 draws per case follow the exact distribution."""

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
# `test_against_vllm` compares each parameter's probabilities, `test_draw` how tokens are drawn from them.
CASES = {
    "plain": {},
    "temperature": {"temperature": 2.5},
    "filters": {"temperature": 1.3, "top_p": 0.9, "top_k": 50, "min_p": 0.02},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "lists": {"logit_bias": {2: 4.0, 5: -2.0}, "bad_words": ((60, 61, 12), (61, 13), (5, 14), (60, 15))},
    "all": ALL,
}


def logits_of(kind: str) -> torch.Tensor:
    """Returns logits, float32 [vocab]: arbitrary, with bfloat16's few values, or peaked like a model's."""
    noise = torch.randn(VOCAB, generator=torch.Generator().manual_seed(11))
    if kind == "bfloat16":
        return (noise * 2).bfloat16().float()
    return noise * (3 if kind == "peaked" else 1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "peaked"])
def test_draws_follow_the_exact_distribution(case: str, kind: str) -> None:
    """A chi-square test of the counts at p = 1e-4, with fixed seeds."""
    sampling = complete_params(**CASES[case])  # type: ignore[arg-type]
    logits = logits_of(kind)
    exact = expected_probabilities(expected_logits(logits, sampling, PROMPT, OUTPUT), sampling)
    drawn = draw_many(logits, sampling, DRAWS, prompt=PROMPT, output=OUTPUT)
    assert chi_square_p(drawn, exact) > 1e-4


def test_the_test_detects_a_wrong_temperature() -> None:
    logits = logits_of("peaked")
    drawn = draw_many(logits, complete_params(), DRAWS)
    wrong = expected_probabilities(logits.tolist(), complete_params(temperature=1.05))
    assert chi_square_p(drawn, wrong) < 1e-4
