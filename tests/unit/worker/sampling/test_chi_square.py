"""The chi-square test that the tests of sampling use: what it accepts and what it rejects."""

import math

import pytest
import torch

from tests.support.worker.sampling import chi_square_p

DRAWS = 2000
RARE = 400


def many_rare_tokens() -> torch.Tensor:
    """Two frequent tokens, and many that are expected 2.5 times each."""
    return torch.tensor([0.3, 0.2] + [0.5 / RARE] * RARE, dtype=torch.float64)


def drawn(probabilities: torch.Tensor, seed: int) -> torch.Tensor:
    return probabilities.multinomial(DRAWS, replacement=True, generator=torch.Generator().manual_seed(seed))


def test_the_p_value_is_that_of_the_definition() -> None:
    """Counts of 10, 20 and 30 where 20 are expected: the statistic is 10 with two degrees of freedom."""
    tokens = torch.tensor([0] * 10 + [1] * 20 + [2] * 30)
    assert chi_square_p(tokens, torch.full((3,), 1 / 3)) == pytest.approx(math.exp(-5), rel=1e-6)


def test_draws_from_the_distribution_pass() -> None:
    """Of 400 samples, about a twentieth has a p-value below 0.05."""
    values = [chi_square_p(drawn(many_rare_tokens(), seed), many_rare_tokens()) for seed in range(400)]
    assert 0.02 < sum(value < 0.05 for value in values) / len(values) < 0.09
    assert min(values) > 1e-4


def test_a_token_that_is_hardly_expected_may_be_drawn() -> None:
    """Two draws of a token that is expected 0.1 times, which half a percent of samples has, are no proof."""
    tokens = torch.tensor([0] * 500 + [1] * 498 + [2] * 2)
    assert chi_square_p(tokens, torch.tensor([0.5, 0.4999, 0.0001])) > 1e-2


@pytest.mark.parametrize("seed", range(5))
def test_a_wrong_distribution_of_rare_tokens_is_rejected(seed: int) -> None:
    """Half of the rare tokens come twice as often and the others never, so their sum is right."""
    wrong = many_rare_tokens()
    wrong[2 : 2 + RARE // 2] *= 2
    wrong[2 + RARE // 2 :] = 0
    assert chi_square_p(drawn(wrong, seed), many_rare_tokens()) < 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_a_wrong_distribution_of_frequent_tokens_is_rejected(seed: int) -> None:
    """The first token comes half as often again."""
    wrong = many_rare_tokens()
    wrong[0] *= 2
    assert chi_square_p(drawn(wrong / wrong.sum(), seed), many_rare_tokens()) < 1e-6


def test_a_token_without_probability_is_an_error() -> None:
    """No number of draws excuses it."""
    with pytest.raises(AssertionError, match="probability 0"):
        chi_square_p(torch.tensor([0, 1, 2] * 10), torch.tensor([0.5, 0.5, 0.0]))
