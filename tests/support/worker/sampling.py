"""Sampling without a model: requests in slots, draws from given logits, and results by definition."""

import math
from collections.abc import Sequence

import torch

from protos.steps import Admission
from protos.triptych.v1 import common_pb2
from tests.support.sampling_params import changed
from worker_svc.sampling.sampler import sample
from worker_svc.sampling.state import SamplingState, SamplingVocabulary

LONGEST = 64

# Pearson's test is good enough for bins of this size and more.
_EXPECTED_IN_BIN = 5


def request(
    slot: int,
    sampling: common_pb2.SamplingParams,
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    sequence: int = 0,
) -> Admission:
    """Returns the admission of a request that has already sampled `output`."""
    return Admission(
        slot, (*prompt, *output), 0, sampling, {}, sequence=sequence, num_prompt_tokens=len(prompt)
    )


def admit(state: SamplingState, admission: Admission) -> None:
    """Stores a request's tokens and parameters as a batch does."""
    state.tokens[admission.slot, : len(admission.token_ids)] = torch.tensor(admission.token_ids)
    state.parameters.rows[admission.slot] = torch.tensor(state.set(admission))


def make_state(
    requests: Sequence[Admission], vocab: int, *, slots: int | None = None, ends: tuple[int, ...] = ()
) -> SamplingState:
    """Returns the state of slots that hold these requests."""
    rows = (len(requests) if slots is None else slots) + 1
    state = SamplingState(
        torch.zeros((rows, LONGEST + 1), dtype=torch.int64), SamplingVocabulary(vocab, ends)
    )
    for each in requests:
        admit(state, each)
    return state


def choose(
    state: SamplingState,
    logits: torch.Tensor,
    lengths: Sequence[int],
    slots: Sequence[int] | None = None,
    padding: int = 0,
) -> torch.Tensor:
    """Samples a token for each row of `logits`, which are those of `slots`; -1 where no token is allowed.

    `lengths` has the number of tokens so far of every slot, and `padding` rows follow the real ones.
    """
    slots = list(range(state.tokens.shape[0] - 1)) if slots is None else slots
    rows = torch.tensor([*slots, *[state.tokens.shape[0] - 1] * padding])
    positions = torch.tensor([*(lengths[slot] for slot in slots), *[1] * padding])
    padded = torch.cat([logits, torch.zeros(padding, logits.shape[-1])])
    before = padded.clone()
    _, reported = sample(state, state.batch(slots, lengths).needs, padded, rows, positions)
    assert torch.equal(padded, before)  # log-probabilities are computed from them afterwards
    return reported[: len(slots)]


def draw_many(
    logits: torch.Tensor,
    sampling: common_pb2.SamplingParams,
    count: int,
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
) -> torch.Tensor:
    """Draws from `logits` [vocab] once for each seed from 0 to count - 1: int64 [count]."""
    slots = min(count, 500)
    each = [request(slot, changed(sampling, seed=slot), prompt, output) for slot in range(slots)]
    state = make_state(each, logits.shape[0])
    lengths = [len(prompt) + len(output)] * slots
    drawn = [choose(state, logits.expand(slots, -1), lengths)]
    for _ in range(1, -(-count // slots)):
        # Only the seed differs between slots; admitting every request again would cost more than the draws.
        state.parameters.seed.add_(slots)
        drawn.append(choose(state, logits.expand(slots, -1), lengths))
    return torch.cat(drawn)[:count]


def chi_square_p(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Returns the p-value of Pearson's chi-square test that `tokens` come from the distribution.

    Each bin expects five tokens or more: rare ids share bins with their neighbours.
    """
    observed = torch.bincount(tokens, minlength=len(probabilities)).double()
    expected = probabilities.double() * len(tokens)
    assert not observed[expected == 0].any(), "a token with probability 0 was drawn"
    common = expected >= _EXPECTED_IN_BIN
    bins = [*zip(observed[common].tolist(), expected[common].tolist(), strict=True)]
    rare, rare_expected = 0.0, 0.0
    for count, share in zip(observed[~common].tolist(), expected[~common].tolist(), strict=True):
        rare, rare_expected = rare + count, rare_expected + share
        if rare_expected >= _EXPECTED_IN_BIN:
            bins.append((rare, rare_expected))
            rare, rare_expected = 0.0, 0.0
    assert len(bins) > 1 or torch.count_nonzero(expected) == 1, "too few draws for two bins"
    last, last_expected = bins.pop()
    bins.append((last + rare, last_expected + rare_expected))
    statistic = sum((count - share) ** 2 / share for count, share in bins)
    freedom = torch.tensor(max(len(bins) - 1, 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def expected_logits(
    logits: torch.Tensor,
    sampling: common_pb2.SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    ends: Sequence[int] = (),
) -> list[float]:
    """Returns the logits [vocab] of one row after all adjustments, computed by their definitions."""
    found = logits.double().tolist()
    for token in range(len(found)):
        if sampling.allowed_token_ids and token not in sampling.allowed_token_ids:
            found[token] = -math.inf
    for word in (each.token_ids for each in sampling.bad_words):
        prefix = len(word) - 1
        if prefix <= len(output) and list(output[len(output) - prefix :]) == list(word[:-1]):
            found[word[-1]] = -math.inf
    if len(output) < sampling.min_tokens:
        early = {*ends, *sampling.stop_token_ids}
        held_back = [-math.inf if token in early else value for token, value in enumerate(found)]
        if max(held_back) > -math.inf:
            found = held_back
    for token, bias in sampling.logit_bias.items():
        found[token] += bias
    for token in {*prompt, *output}:
        value = found[token]
        found[token] = (
            value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        )
    for token in set(output):
        times = list(output).count(token)
        found[token] -= sampling.frequency_penalty * times + sampling.presence_penalty
    return found


def expected_probabilities(logits: Sequence[float], sampling: common_pb2.SamplingParams) -> torch.Tensor:
    """Returns the probabilities after temperature and filters, by definition: float64 [vocab]."""
    scaled = torch.tensor(logits, dtype=torch.float64) / sampling.temperature
    weights = scaled.softmax(-1)
    weights[weights < sampling.min_p * weights.max()] = 0
    if sampling.top_k:
        kth = weights.sort(descending=True).values[min(sampling.top_k, len(weights)) - 1]
        weights[weights < kth] = 0
    weights /= weights.sum()
    if sampling.top_p < 1:
        above = torch.stack([weights[weights > weight].sum() for weight in weights])
        weights[above >= sampling.top_p] = 0
    return weights / weights.sum()
