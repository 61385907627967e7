"""Draws follow the masses, are the same on every device, and change only where two tokens almost tie."""

import math

import pytest
import torch

from tests.bench.support.same_tokens import inverse_changes, race_changes
from tests.support.worker.sampling import chi_square_p
from worker_svc.sampling.draw import BLOCK, draw, draw_keys, sequence_seed

COUNT = 10_000
WORD = (1 << 64) - 1


def masses(probabilities: torch.Tensor, rows: int = COUNT) -> torch.Tensor:
    """Returns the same masses for each row, int64 [rows, vocab]."""
    return (probabilities.double() * 2**40).long().expand(rows, -1).contiguous()


def mix(word: int) -> int:
    """Returns splitmix64's output function of an unsigned word, from its definition."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & WORD
    return word ^ word >> 31


def by_definition(mass: list[int], seed: int, position: int, attempt: int) -> int:
    """Returns the drawn token, computed with Python's integers."""
    key = seed + position * 0xD1342543DE82EF95 + attempt * 0xAF251AF3B0F025B5

    def time(word: int, rate: int) -> float:
        return -math.log(((mix(word & WORD) >> 12) + 0.5) * 2.0**-52) / rate if rate else math.inf

    starts = range(0, len(mass), BLOCK)
    block = min(
        starts, key=lambda at: time(key + (at // BLOCK + 1) * 0xDA942042E4DD58B5, sum(mass[at : at + BLOCK]))
    )
    tokens = range(block, min(block + BLOCK, len(mass)))
    return min(tokens, key=lambda token: time(key + token * 0x9FB21C651E98DF25, mass[token]))


@pytest.mark.parametrize("vocab", [1, 3, 255, 256, 257, 1000])
def test_a_draw_is_its_definition(vocab: int) -> None:
    """Each token is the one that a race of Python's integers gives, so every device draws the same."""
    generator = torch.Generator().manual_seed(vocab)
    mass = torch.randint(0, 1 << 44, (16, vocab), generator=generator)
    mass *= torch.rand(16, vocab, generator=generator) < 0.7
    seeds = torch.tensor([sequence_seed(seed * 2**60 % 2**64, seed % 3) for seed in range(16)])
    positions = torch.arange(16) * 1000
    for attempt in (0, 1):
        drawn = draw(mass, draw_keys(seeds, positions, attempt)).tolist()
        expected = [
            by_definition(row, seed, position, attempt)
            for row, seed, position in zip(mass.tolist(), seeds.tolist(), positions.tolist(), strict=True)
        ]
        assert drawn == expected


def test_a_sequence_seed_is_a_hash_of_both_numbers() -> None:
    golden = 0x9E3779B97F4A7C15
    for seed, sequence in ((0, 0), (1, 0), (0, 1), (2**64 - 1, 127)):
        word = sequence_seed(seed, sequence)
        assert -(2**63) <= word < 2**63
        assert word & WORD == mix((seed + (sequence + 1) * golden) & WORD)


@pytest.mark.parametrize("vocab", [4, 300, 5000])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_draws_follow_the_masses(vocab: int, temperature: float) -> None:
    """Pearson's chi-square test over one block and over many."""
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) / temperature
    exact = masses(logits.softmax(-1), 1)[0].double()
    tokens = [
        draw(
            masses(logits.softmax(-1), 2_000), draw_keys(torch.full((2_000,), 7), torch.arange(2_000) + start)
        )
        for start in range(0, COUNT, 2_000)
    ]
    assert chi_square_p(torch.cat(tokens), exact / exact.sum()) > 1e-4


@pytest.mark.parametrize("kind", ["seeds", "positions", "sequences", "attempts", "seeds and positions"])
def test_neighbouring_draws_are_independent(kind: str) -> None:
    """Pairs of draws fit the product of the distributions, within a block and between blocks."""
    count = torch.arange(COUNT)
    fixed = torch.full((COUNT,), 3)
    pair = {
        "seeds": (draw_keys(count * 2, fixed), draw_keys(count * 2 + 1, fixed)),
        "positions": (draw_keys(fixed, count * 2), draw_keys(fixed, count * 2 + 1)),
        "sequences": tuple(
            draw_keys(torch.tensor([sequence_seed(seed, sequence) for seed in range(COUNT)]), fixed)
            for sequence in (0, 1)
        ),
        "attempts": (draw_keys(count, fixed), draw_keys(count, fixed, attempt=1)),
        "seeds and positions": (draw_keys(count * 2 + 1, fixed), draw_keys(count * 2, fixed + 1)),
    }[kind]
    for places in ((0, 1, 2, 3), (0, 1, BLOCK, 2 * BLOCK)):
        probabilities = torch.zeros(places[-1] + 1)
        probabilities[list(places)] = torch.tensor([0.4, 0.3, 0.2, 0.1])
        first, second = (
            (draw(masses(probabilities), keys)[:, None] == torch.tensor(places)).int().argmax(dim=1)
            for keys in pair
        )
        shares = torch.tensor([0.4, 0.3, 0.2, 0.1])
        assert chi_square_p(first * 4 + second, torch.outer(shares, shares).flatten()) > 1e-4


def test_a_redraw_under_a_mask_keeps_the_masked_distribution() -> None:
    mass = masses(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    seeds, positions = torch.arange(COUNT), torch.full((COUNT,), 9)
    tokens = draw(mass, draw_keys(seeds, positions))
    mass[:, 0] = mass[:, 2] = 0
    again = draw(mass, draw_keys(seeds, positions, attempt=1))
    tokens = torch.where((tokens == 0) | (tokens == 2), again, tokens)
    assert chi_square_p(tokens, torch.tensor([0.0, 0.75, 0.0, 0.25])) > 1e-4


def test_only_tokens_with_mass_are_drawn() -> None:
    for vocab in (1, 3, 255, 256, 257, 1000):
        mass = torch.zeros(vocab, vocab, dtype=torch.int64).fill_diagonal_(1)
        assert draw(mass, torch.arange(vocab)).tolist() == list(range(vocab))
        assert draw(mass * 0, torch.arange(vocab)).tolist() == [0] * vocab


@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_a_draw_changes_only_where_two_tokens_almost_tie(spread: float) -> None:
    """Noise in the logits changes as many draws as the bench computes, and fewer than an inverse CDF."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(2_000, generator=generator) * spread
    noise = torch.randn(2_000, generator=generator) * 0.05
    pair = [each.softmax(-1) for each in (logits, logits + noise)]
    keys = [draw_keys(torch.arange(2_000) + at, torch.full((2_000,), 9)) for at in range(0, 20_000, 2_000)]
    before, after = (torch.cat([draw(masses(each, 2_000), key) for key in keys]) for each in pair)
    changed = float((before != after).double().mean())
    doubles = [each.double()[None] for each in pair]
    assert changed == pytest.approx(race_changes(*doubles), rel=0.15)
    assert changed < 0.7 * inverse_changes(*doubles)
