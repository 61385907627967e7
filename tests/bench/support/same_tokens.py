"""How often a seeded request draws another token in another batch, for `tests.bench.kernels.sampling`.

Kernels of different shapes round differently, so a model's logits depend on the batch. Requests generate
alone, and their logits are recorded. The same tokens are then forced through larger batches, and through
prefill chunks as after a lost worker. The logits of both runs say how likely one seed draws
different tokens from them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from tests.support.sampling_params import sampling_params
from tests.support.worker.harness import Harness
from tests.support.worker.sampling import request
from worker_svc.sampling.draw import BLOCK
from worker_svc.sampling.sampler import filtered_masses
from worker_svc.sampling.state import SamplingState, SamplingVocabulary

BATCHES: Final = (16, 32)
"""Rows of the decode steps that are compared with steps of one row."""
FILTERS: Final[dict[str, dict[str, float]]] = {
    "temperature": {},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50": {"top_k": 50},
}
"""What is sampled beside the temperature, by the name in the report."""
ANSWER: Final = 128
"""Tokens of the answers whose share of differing ones is reported."""


@dataclass(frozen=True)
class Recording:
    """What the model computed for some sequences."""

    tokens: list[list[int]]
    """Each sequence's prompt and output."""
    logits: list[torch.Tensor]
    """Each sequence's float32 [positions, vocab], on the model's device."""
    positions: list[list[int]]
    """Positions of the sampled tokens that these logits are of, by sequence."""


@dataclass(frozen=True)
class Rates:
    """How two recordings of the same tokens differ. Probabilities are over all seeds."""

    race: float
    """Probability that a draw gives another token, mean of all positions."""
    inverse: float
    """The same for draws by an inverse CDF in the order of token ids, for comparison."""
    logits: float
    """Mean absolute difference of the logits."""

    @property
    def answer(self) -> float:
        """Share of the answers of `ANSWER` tokens in which a token differs."""
        return 1 - (1 - self.race) ** ANSWER


@contextmanager
def recorded(harness: Harness) -> Iterator[list[torch.Tensor]]:
    """Collects a copy of the logits of each step's real rows."""
    selector: Any = harness.runner._selector
    select, collected = selector.select, []

    def select_and_record(
        slots: Sequence[int], rows: torch.Tensor, logits: torch.Tensor, *rest: Any, **named: Any
    ) -> Any:
        collected.append(logits[: len(slots)].clone())
        return select(slots, rows, logits, *rest, **named)

    selector.select = select_and_record
    try:
        yield collected
    finally:
        del selector.select


def measure_rates(
    harness: Harness, prompts: Sequence[Sequence[int]], temperature: float, *, quick: bool
) -> Iterator[tuple[str, Rates]]:
    """Yields the rates of each kind of run and each filter, with their names."""
    num_tokens, every = (9, 4) if quick else (33, 8)
    alone = record_alone(harness, prompts, num_tokens, temperature)
    others = {f"{batch} rows": record_batch(harness, alone, num_tokens, batch) for batch in BATCHES}
    others["recomputed by prefill"] = record_resumed(harness, alone, num_tokens, every)
    for kind, other in others.items():
        for name, fields in FILTERS.items():
            yield f"{kind}, {name}", compare(alone, other, {"temperature": temperature, **fields})


def record_alone(
    harness: Harness, prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float
) -> Recording:
    """Generates a seeded answer to each prompt, one after the other."""
    recording = Recording([], [], [])
    for index, prompt in enumerate(prompts):
        sampling = sampling_params(temperature=temperature, seed=index)
        with recorded(harness) as steps:
            (outputs,) = harness.generate([prompt], num_tokens, sampling)
        recording.tokens.append([*prompt, *(token for each in outputs for token in each.token_ids)])
        recording.logits.append(torch.cat(steps[-num_tokens:]))
        recording.positions.append([len(prompt) + at for at in range(num_tokens)])
    return recording


def record_batch(harness: Harness, alone: Recording, num_tokens: int, batch: int) -> Recording:
    """Forces the same tokens through decode steps of `batch` rows."""
    tokens = [alone.tokens[index % len(alone.tokens)] for index in range(batch)]
    prompt_lens = [len(each) - num_tokens for each in tokens]
    slots = range(batch)
    known: torch.Tensor = harness.runner._batch.sampling.tokens
    with recorded(harness) as steps:
        for slot in slots:
            harness.prefill(slot, tokens[slot][: prompt_lens[slot]])
        steps.clear()
        for at in range(num_tokens - 1):
            for slot in slots:
                position = prompt_lens[slot] + at
                known[slot, position] = tokens[slot][position]
            harness.decode(slots, batch)
    harness.release(slots)
    count = min(batch, len(alone.tokens))
    return Recording(
        tokens[:count],
        [torch.stack([step[slot] for step in steps]) for slot in range(count)],
        [[prompt_lens[slot] + at for at in range(1, num_tokens)] for slot in range(count)],
    )


def record_resumed(harness: Harness, alone: Recording, num_tokens: int, every: int) -> Recording:
    """Computes every so many tokens' logits in prefill chunks of all tokens before them."""
    resumed = Recording(alone.tokens, [], [])
    for tokens in alone.tokens:
        ends = range(len(tokens) - num_tokens + every, len(tokens), every)
        with recorded(harness) as steps:
            for end in ends:
                harness.prefill(0, tokens[:end])
                harness.release([0])
        resumed.logits.append(torch.cat(steps))
        resumed.positions.append(list(ends))
    return resumed


def compare(alone: Recording, other: Recording, fields: dict[str, float]) -> Rates:
    """Computes how likely a draw at the same position of both recordings gives different tokens."""
    found = []
    for first, start, logits, positions in zip(
        alone.logits, (each[0] for each in alone.positions), other.logits, other.positions, strict=False
    ):
        pair = first[[position - start for position in positions]], logits
        one, two = (probabilities(each, fields) for each in pair)
        distance = (pair[0] - pair[1]).abs().mean()
        found.append([race_changes(one, two), inverse_changes(one, two), float(distance)])
    return Rates(*torch.tensor(found, dtype=torch.float64).mean(dim=0).tolist())


def probabilities(logits: torch.Tensor, fields: dict[str, float]) -> torch.Tensor:
    """Returns what a draw from logits [rows, vocab] sees: float64 [rows, vocab]."""
    rows, device = len(logits), logits.device
    tokens = torch.zeros((rows + 1, 1), dtype=torch.int64, device=device)
    state = SamplingState(tokens, SamplingVocabulary(logits.shape[1]))
    for slot in range(rows):
        parameters = state.set(request(slot, sampling_params(**fields)))  # type: ignore[arg-type]
        state.parameters.rows[slot] = torch.tensor(parameters)
    needs, slots = state.batch(range(rows), [1] * rows).needs, torch.arange(rows, device=device)
    best = logits.amax(dim=-1, keepdim=True)
    masses = [
        filtered_masses(state, needs, logits[part], best[part], slots[part], tile).double()
        for part, tile in state.workspace(rows).tiles(rows)
    ]
    mass = torch.cat(masses)
    return mass / mass.sum(dim=-1, keepdim=True)


def race_changes(one: torch.Tensor, two: torch.Tensor) -> float:
    """Returns the probability that `draw` gives different tokens for two distributions [rows, vocab]."""
    padding = -one.shape[1] % BLOCK
    pair = [torch.nn.functional.pad(each, (0, padding)).view(len(each), -1, BLOCK) for each in (one, two)]
    same_token = _same_winner(*pair).sum(dim=-1)
    same_block = _same_winner(*(each.sum(dim=-1) for each in pair))
    return float(1 - (same_block * same_token).sum(dim=-1).mean())


def _same_winner(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """Returns each contender's probability to win two races with the same random numbers.

    A contender wins both if its time is below that of each other one in both. Times are exponential, so this
    has the probability 1 / sum over the others of the larger of its two rates, relative to the contender's.
    """
    ratio = torch.nan_to_num(two / one, nan=0.0)
    order = ratio.argsort(dim=-1)
    first, second = one.gather(-1, order), two.gather(-1, order)
    above = second.sum(dim=-1, keepdim=True) - second.cumsum(dim=-1)
    wins = 1 / (first.cumsum(dim=-1) / first + above / second)
    return torch.empty_like(wins).scatter_(-1, order, torch.nan_to_num(wins, nan=0.0))


def inverse_changes(one: torch.Tensor, two: torch.Tensor) -> float:
    """Returns the probability that an inverse CDF gives different tokens: numbers outside both intervals."""
    ends = one.cumsum(dim=-1), two.cumsum(dim=-1)
    starts = ends[0] - one, ends[1] - two
    both = torch.minimum(*ends) - torch.maximum(*starts)
    return float(1 - both.clamp(min=0).sum(dim=-1).mean())
