"""common_pb2.SamplingParams without a model: slots filled with requests, tokens drawn of given logits, and what they should be by the definitions."""

import math
from collections.abc import Sequence

import torch

from protos.steps import Admission
from protos.triptych.v1 import common_pb2
from tests.support.sampling_params import changed
from worker_svc.sampling.sampler import sample
from worker_svc.sampling.state import SamplingState, SamplingVocabulary

LONGEST = 64


def request(
    slot: int,
    sampling: common_pb2.SamplingParams,
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    sequence: int = 0,
) -> Admission:
    """A request that has sampled ``output`` already."""
    return Admission(
        slot, (*prompt, *output), 0, sampling, {}, sequence=sequence, num_prompt_tokens=len(prompt)
    )


def admit(state: SamplingState, admission: Admission) -> None:
    """What a batch does with a request's tokens and parameters."""
    state.check(admission)
    state.tokens[admission.slot, : len(admission.token_ids)] = torch.tensor(admission.token_ids)
    state.set(admission)


def make_state(
    requests: Sequence[Admission], vocab: int, *, slots: int | None = None, ends: tuple[int, ...] = ()
) -> SamplingState:
    """Slots with these requests."""
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
    """One token for each slot, int64 [slots]; -1 where none is allowed.

    Args:
        state: with the slots' requests.
        logits: float32 [slots, vocab].
        lengths: known tokens, by slot.
        slots: in the order of ``logits``; by default all of them.
        padding: rows behind the real ones.
    """
    slots = list(range(state.tokens.shape[0] - 1)) if slots is None else slots
    rows = torch.tensor([*slots, *[state.tokens.shape[0] - 1] * padding])
    positions = torch.tensor([*(lengths[slot] for slot in slots), *[1] * padding])
    padded = torch.cat([logits, torch.zeros(padding, logits.shape[-1])])
    before = padded.clone()
    _, told = sample(state, state.batch(slots, lengths).needs, padded, rows, positions)
    assert torch.equal(padded, before)  # they are reported afterwards
    return told[: len(slots)]


def draw_many(
    logits: torch.Tensor,
    sampling: common_pb2.SamplingParams,
    count: int,
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
) -> torch.Tensor:
    """The same draw under seeds 0 .. count - 1, int64 [count]; ``logits`` are [vocab]."""
    slots = min(count, 500)
    each = [request(slot, changed(sampling, seed=slot), prompt, output) for slot in range(slots)]
    state = make_state(each, logits.shape[0])
    lengths = [len(prompt) + len(output)] * slots
    drawn = [choose(state, logits.expand(slots, -1), lengths)]
    for _ in range(1, -(-count // slots)):
        # The seed is the only thing that a slot has of its own; to take it anew would cost more than to draw.
        state.seed += slots
        drawn.append(choose(state, logits.expand(slots, -1), lengths))
    return torch.cat(drawn)[:count]


def chi_square_p(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Pearson's test: how likely counts as far off as these are, if the tokens come from the distribution.

    Tokens that are expected less than five times are taken together.
    """
    observed = torch.bincount(tokens, minlength=len(probabilities)).double()
    expected = probabilities.double() * len(tokens)
    assert not observed[expected == 0].any(), "a token was drawn that has no probability"
    rare = expected < 5
    observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor(max(len(expected) - 1, 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def expected_logits(
    logits: torch.Tensor,
    sampling: common_pb2.SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    ends: Sequence[int] = (),
) -> list[float]:
    """The logits of one row after all that changes them, by the definitions; ``logits`` are [vocab]."""
    found = logits.double().tolist()
    for token in range(len(found)):
        if sampling.allowed_token_ids and token not in sampling.allowed_token_ids:
            found[token] = -math.inf
    for word in (each.token_ids for each in sampling.bad_words):
        begun = len(word) - 1
        if begun <= len(output) and list(output[len(output) - begun :]) == list(word[:-1]):
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
    """What one row is drawn from, float64 [vocab], by the definitions: temperature, ``min_p``, ``top_k``, ``top_p``."""
    scaled = torch.tensor(logits, dtype=torch.float64) / sampling.temperature
    weights = scaled.softmax(-1)
    weights[weights < sampling.min_p * weights.max()] = 0
    if sampling.top_k:
        kth = weights.sort(descending=True).values[min(sampling.top_k, len(weights)) - 1]
        weights[weights < kth] = 0
    weights /= weights.sum()
    if sampling.top_p < 1:
        more = torch.stack([weights[weights > weight].sum() for weight in weights])
        weights[more >= sampling.top_p] = 0
    return weights / weights.sum()
