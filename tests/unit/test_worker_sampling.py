"""What the sampler keeps, what it draws, and of what its draws are independent."""

import pytest
import torch

from worker_svc.plan import Sampling
from worker_svc.sampling import SamplingState, exponential_noise, logprobs_of, sample

VOCAB = 50


def draw(
    logits: torch.Tensor, samplings: list[Sampling], positions: torch.Tensor | None = None, padding: int = 0
) -> list[int]:
    """One token for each sampling; ``logits`` are [rows, vocab], or [vocab] for all rows."""
    state = SamplingState(len(samplings), torch.device("cpu"))
    for slot, sampling in enumerate(samplings):
        state.set(slot, sampling, sequence=0)
    slots = list(range(len(samplings)))
    rows = torch.tensor(slots + [len(samplings)] * padding)
    logits = logits.expand(len(samplings), -1) if logits.dim() == 1 else logits
    logits = torch.cat([logits, torch.zeros(padding, logits.shape[-1])])
    if positions is None:
        positions = torch.zeros(len(rows), dtype=torch.int64)
    return sample(logits, positions, state.gather(slots, rows)).tolist()[: len(samplings)]


def seeds(count: int, **fields: float) -> list[Sampling]:
    """Equal samplings but for their seeds."""
    return [Sampling(seed=seed, **fields) for seed in range(count)]  # type: ignore[arg-type]


def some_logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def chi_square(tokens: list[int], probabilities: torch.Tensor) -> float:
    """The statistic of observed against expected counts."""
    observed = torch.bincount(torch.tensor(tokens), minlength=len(probabilities)).double()
    expected = probabilities.double() * len(tokens)
    assert not observed[expected == 0].any()
    used = expected > 0
    return float(((observed - expected)[used] ** 2 / expected[used]).sum())


def test_greedy_takes_the_likeliest() -> None:
    """Temperature 0 is the argmax, whatever else is set."""
    logits = some_logits(3)
    samplings = [Sampling(temperature=0.0, top_k=5, top_p=0.3, min_p=0.2, seed=seed) for seed in range(3)]
    assert draw(logits, samplings) == logits.argmax(dim=-1).tolist()


def test_greedy_only_step_gathers_nothing() -> None:
    """A step of greedy rows alone has no parameters to compute with."""
    state = SamplingState(2, torch.device("cpu"))
    state.set(0, Sampling(temperature=0.0, top_p=0.5), 0)
    batch = state.gather([0], torch.tensor([0, 2]))
    assert batch.temperature is None
    assert batch.top_p is None


def test_greedy_rows_ignore_random_neighbours() -> None:
    """A greedy row among random ones is still the argmax."""
    logits = some_logits(2)
    tokens = draw(logits, [Sampling(temperature=0.0), Sampling(temperature=1.0, seed=3, top_k=3)])
    assert tokens[0] == int(logits[0].argmax())


def test_samples_follow_the_distribution() -> None:
    """Counts over many seeds fit the softmax (chi-square, 1 in 10,000)."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0])
    tokens = draw(logits, seeds(20_000))
    assert chi_square(tokens, logits.softmax(-1)) < 25.7  # 5 degrees of freedom


def test_positions_are_independent_draws() -> None:
    """Counts over many positions of one seed fit the softmax too."""
    logits = torch.tensor([1.0, 0.5, 0.0, -0.5])
    count = 20_000
    positions = torch.arange(count)
    tokens = draw(logits, [Sampling(seed=7)] * count, positions)
    assert chi_square(tokens, logits.softmax(-1)) < 21.1  # 3 degrees of freedom
    pairs = [first * 4 + second for first, second in zip(tokens[::2], tokens[1::2], strict=True)]
    expected = torch.outer(logits.softmax(-1), logits.softmax(-1)).flatten()
    assert chi_square(pairs, expected) < 44.3  # 15 degrees of freedom


def test_temperature_flattens() -> None:
    """Counts at temperature 2 fit the softmax of half the logits."""
    logits = torch.tensor([2.0, 0.0, -2.0])
    tokens = draw(logits, seeds(20_000, temperature=2.0))
    assert chi_square(tokens, (logits / 2).softmax(-1)) < 18.4  # 2 degrees of freedom


def test_tiny_temperature_is_greedy() -> None:
    """Near 0 nothing overflows and the likeliest token wins."""
    logits = some_logits(4)
    assert draw(logits, seeds(4, temperature=1e-4)) == logits.argmax(dim=-1).tolist()


def test_top_k_keeps_k() -> None:
    """Only the k likeliest are drawn, in their own proportions."""
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])
    tokens = draw(logits, seeds(10_000, top_k=3))
    kept = torch.where(logits >= 1.0, logits, -torch.inf)
    assert chi_square(tokens, kept.softmax(-1)) < 18.4


def test_top_k_keeps_ties() -> None:
    """Tokens as likely as the k-th stay together, so that their order cannot matter."""
    logits = torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert set(draw(logits, seeds(500, top_k=2))) == {0, 1, 2}


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    """A k larger than the vocabulary is off."""
    logits = torch.zeros(4)
    assert set(draw(logits, seeds(500, top_k=100))) == {0, 1, 2, 3}


@pytest.mark.parametrize(("top_p", "kept"), [(0.4, 1), (0.5, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.999, 4)])
def test_top_p_keeps_the_smallest_sufficient_set(top_p: float, kept: int) -> None:
    """Of probabilities 0.5, 0.3, 0.15, 0.05 the nucleus is the shortest prefix with at least the mass."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(draw(logits, seeds(2_000, top_p=top_p))) == set(range(kept))


def test_top_p_works_on_what_top_k_left() -> None:
    """After top_k 2 of 0.5, 0.3, ..., the likeliest has 0.625 of the mass: enough for a top_p of 0.6."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(draw(logits, seeds(500, top_k=2, top_p=0.6))) == {0}
    assert set(draw(logits, seeds(500, top_k=2, top_p=0.7))) == {0, 1}


def test_flat_nucleus_beyond_the_candidates() -> None:
    """A nucleus larger than the candidates that are looked at first is found all the same."""
    vocab = 5_000
    logits = torch.linspace(1.0, 0.0, vocab)
    tokens = draw(logits, seeds(400, top_p=0.5))
    cutoff = int((logits.softmax(-1).cumsum(-1) < 0.5).sum())
    assert max(tokens) <= cutoff
    assert max(tokens) > 1_024


def test_min_p_drops_the_unlikely() -> None:
    """Tokens below min_p times the likeliest are not drawn."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(draw(logits, seeds(1_000, min_p=0.5))) == {0, 1}


def test_rows_filter_independently() -> None:
    """Each row of a mixed batch keeps what its own filters keep."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    mixed = [Sampling(seed=s, top_k=1) if s % 2 else Sampling(seed=s) for s in range(1_000)]
    tokens = draw(logits, mixed)
    assert set(tokens[1::2]) == {0}
    assert set(tokens[0::2]) == {0, 1, 2, 3}


def test_seed_decides_whatever_the_neighbours() -> None:
    """A request draws the same token alone, beside others and above padding."""
    logits = some_logits(6, seed=1)
    samplings = [
        Sampling(seed=2**64 - 1),
        Sampling(seed=5, top_p=0.8),
        Sampling(seed=6, top_k=4, temperature=1.5),
        Sampling(seed=7, min_p=0.1),
        Sampling(temperature=0.0),
        Sampling(seed=8, top_k=30, top_p=0.9, min_p=0.01),
    ]
    positions = torch.tensor([3, 9, 1, 1000, 2, 5])
    together = draw(logits, samplings, positions)
    for row, sampling in enumerate(samplings):
        alone = draw(logits[row : row + 1], [sampling], positions[row : row + 1])
        padded = draw(
            logits[row : row + 1], [sampling], torch.tensor([int(positions[row]), 0, 0, 0]), padding=3
        )
        assert alone == padded == [together[row]]


def test_seed_and_position_and_sequence_change_the_draw() -> None:
    """Each of the three leads to other noise."""
    logits = torch.zeros(1, 10_000)
    rows = torch.tensor([0])

    def one(seed: int, position: int, sequence: int) -> int:
        state = SamplingState(1, torch.device("cpu"))
        state.set(0, Sampling(seed=seed), sequence)
        return int(sample(logits, torch.tensor([position]), state.gather([0], rows)))

    drawn = [one(1, 0, 0), one(2, 0, 0), one(1, 1, 0), one(1, 0, 1), one(0, 0, 0)]
    assert len(set(drawn)) == len(drawn)


def test_noise_is_exponential() -> None:
    """Mean, variance and tail of the noise are those of a standard exponential."""
    noise = exponential_noise(torch.arange(64), 4_096).double()
    assert noise.min() > 0
    assert float(noise.mean()) == pytest.approx(1, abs=0.01)
    assert float(noise.var()) == pytest.approx(1, abs=0.03)
    assert float((noise > 3).double().mean()) == pytest.approx(0.0498, abs=0.002)
    # Neighbouring rows and neighbouring columns are unrelated.
    for first, second in ((noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1])):
        correlation = float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])
        assert abs(correlation) < 0.01


def test_logprobs_are_of_the_unfiltered_distribution() -> None:
    """Chosen token, rank and likeliest tokens are reported before temperature and filters, for rows that asked."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    asked = [Sampling(temperature=0.2, top_k=1, logprobs=2), Sampling()]
    first, second = logprobs_of(logits, torch.tensor([2, 3]), asked)
    expected = logits[0].log_softmax(-1)
    assert second is None
    assert first is not None
    assert first.logprob == pytest.approx(float(expected[2]), abs=1e-6)
    assert first.rank == 2
    assert list(first.top_token_ids) == [1, 2]
    assert list(first.top_logprobs) == pytest.approx([float(expected[1]), float(expected[2])], abs=1e-6)


def test_logprobs_of_the_chosen_token_alone() -> None:
    """0 asks for the chosen token's log-probability and no others."""
    (report,) = logprobs_of(torch.zeros(1, 4), torch.tensor([1]), [Sampling(logprobs=0)])
    assert report is not None
    assert report.logprob == pytest.approx(-1.386294, abs=1e-5)
    assert (report.rank, list(report.top_token_ids)) == (1, [])
