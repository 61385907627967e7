"""Chooses tokens on the device, for all rows of a step at once.

The order of filters is vLLM's: temperature, ``min_p``, ``top_k``, then ``top_p`` over what is left. Each filter is a threshold on the
scaled logits, so tokens of equal logits (common in bfloat16) are kept or dropped together, whatever their order.

A sample is the winner of an exponential race: token ``i`` arrives at ``E_i / p_i`` with ``E_i`` exponential, and the first to arrive is
``i`` with probability ``p_i``. ``E_i`` is a hash of (seed, sequence, position, i) and of nothing else, so a request's samples depend
neither on its neighbours in the batch nor on whether the step is a replay.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker_svc.plan import Logprobs, Sampling

# Candidates among which the nucleus is sought first; a row that needs more makes the whole step sort the vocabulary.
_NUCLEUS_CANDIDATES = 1024

_MASK_64 = (1 << 64) - 1
_GOLDEN_64 = 0x9E3779B97F4A7C15


class SamplingState:
    """The sampling parameters of every slot, as tensors, so that a step gathers its rows' without a loop.

    Row ``num_slots`` belongs to padding and is greedy.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        """All slots start greedy."""
        rows = num_slots + 1
        self._sampling = [Sampling(temperature=0.0)] * rows
        self.temperature = torch.zeros(rows, device=device)
        self.top_p = torch.ones(rows, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.int64, device=device)
        self.min_p = torch.zeros(rows, device=device)
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)

    def set(self, slot: int, sampling: Sampling, sequence: int) -> None:
        """Takes over a request's parameters. ``sequence`` is which of the request's sequences the slot runs."""
        self._sampling[slot] = sampling
        self.temperature[slot] = sampling.temperature
        self.top_p[slot] = sampling.top_p
        self.top_k[slot] = sampling.top_k
        self.min_p[slot] = sampling.min_p
        self.seed[slot] = _signed((sampling.seed + sequence * _GOLDEN_64) & _MASK_64)

    def gather(self, slots: Sequence[int], rows: torch.Tensor) -> "SamplingBatch":
        """The parameters of one step.

        Args:
            slots: the real rows' slots.
            rows: int64 [bucket], all rows' slots, padding included.
        """
        asked = [self._sampling[slot] for slot in slots]
        random = [sampling for sampling in asked if sampling.temperature > 0]
        if not random:
            return SamplingBatch(asked)
        return SamplingBatch(
            asked,
            temperature=self.temperature[rows],
            seed=self.seed[rows],
            min_p=self.min_p[rows] if any(sampling.min_p for sampling in random) else None,
            top_k=self.top_k[rows] if any(sampling.top_k for sampling in random) else None,
            top_p=self.top_p[rows] if any(sampling.top_p < 1 for sampling in random) else None,
            largest_top_k=max(sampling.top_k for sampling in random),
        )


@dataclass(frozen=True)
class SamplingBatch:
    """The parameters of one step's rows. A filter that no row uses is ``None``, and so are all of them where every row is greedy."""

    asked: Sequence[Sampling]
    temperature: torch.Tensor | None = None
    seed: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    largest_top_k: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether each row takes the most probable token."""
        return self.temperature is None


def sample(logits: torch.Tensor, positions: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Chooses one token a row.

    Args:
        logits: float32 [rows, vocab].
        positions: int64 [rows], the position that each sampled token will have in its sequence.
        batch: the rows' parameters.

    Returns:
        int64 [rows].
    """
    greedy = logits.argmax(dim=-1)
    if batch.temperature is None or batch.seed is None:
        return greedy
    is_greedy = batch.temperature == 0
    scaled = logits / torch.where(is_greedy, 1.0, batch.temperature)[:, None]
    keys = _mix_64(_mix_64(batch.seed) + positions)
    arrivals = exponential_noise(keys, logits.shape[-1]).log_().neg_().add_(scaled)
    threshold = _threshold(scaled, batch)
    if threshold is not None:
        arrivals.masked_fill_(scaled < threshold, -torch.inf)
    return torch.where(is_greedy, greedy, arrivals.argmax(dim=-1))


def logprobs_of(
    logits: torch.Tensor, tokens: torch.Tensor, asked: Sequence[Sampling]
) -> list[Logprobs | None]:
    """Log-probabilities for the rows that asked for them.

    Args:
        logits: float32 [rows, vocab], before any filter.
        tokens: int64 [rows], the chosen tokens.
        asked: the real rows' parameters, the first rows of ``logits``.
    """
    wanted = [row for row, sampling in enumerate(asked) if sampling.logprobs is not None]
    if not wanted:
        return [None] * len(asked)
    chosen_logits = logits[wanted]
    total = chosen_logits.logsumexp(dim=-1, keepdim=True)
    own = chosen_logits.gather(1, tokens[wanted][:, None])
    ranks = (chosen_logits > own).sum(dim=-1).add_(1).tolist()
    most = max(asked[row].logprobs or 0 for row in wanted)
    top_values, top_ids = (chosen_logits.topk(most, dim=-1)) if most else (own[:, :0], own[:, :0])
    top_logprobs, top_tokens = (top_values - total).tolist(), top_ids.tolist()
    reported: list[Logprobs | None] = [None] * len(asked)
    for index, (row, logprob) in enumerate(zip(wanted, (own - total)[:, 0].tolist(), strict=True)):
        count = asked[row].logprobs or 0
        reported[row] = Logprobs(
            logprob, ranks[index], top_tokens[index][:count], top_logprobs[index][:count]
        )
    return reported


def _threshold(scaled: torch.Tensor, batch: SamplingBatch) -> torch.Tensor | None:
    """The least scaled logit that each row keeps, [rows, 1]; ``None`` if no row filters."""
    best = scaled.amax(dim=-1, keepdim=True)
    threshold = None
    if batch.min_p is not None:
        threshold = best + batch.min_p[:, None].log()  # log 0 is -inf: everything stays
    if batch.top_k is None and batch.top_p is None:
        return threshold
    floor = torch.full_like(best, -torch.inf) if threshold is None else threshold
    vocab = scaled.shape[-1]
    candidates = min(vocab, max(batch.largest_top_k, _NUCLEUS_CANDIDATES if batch.top_p is not None else 0))
    while True:
        values = scaled.topk(candidates, dim=-1).values
        if batch.top_k is not None:
            last = (batch.top_k.clamp(max=candidates) - 1).clamp(min=0)
            kth = values.gather(1, last[:, None])
            floor = torch.maximum(floor, torch.where(batch.top_k[:, None] > 0, kth, -torch.inf))
        if batch.top_p is None:
            return floor
        # The mass is taken over all that is left, which may be more than the candidates.
        left = (scaled - best).exp_().masked_fill_(scaled < floor, 0.0).sum(dim=-1, keepdim=True)
        mass = (values - best).exp_().masked_fill_(values < floor, 0.0) / left
        before = mass.cumsum(dim=-1) - mass
        kept = (before < batch.top_p[:, None]) & (values >= floor)
        if candidates < vocab and bool((kept[:, -1] & (batch.top_p < 1)).any()):
            candidates = vocab
            continue
        nucleus = torch.where(kept, values, torch.inf).amin(dim=-1, keepdim=True)
        # Rows without a nucleus keep what lies beyond the candidates.
        return torch.where(batch.top_p[:, None] < 1, torch.maximum(floor, nucleus), floor)


def exponential_noise(keys: torch.Tensor, width: int) -> torch.Tensor:
    """Standard exponential numbers, float32 [rows, width], each a hash of its row's key (int64 [rows]) and its column.

    32-bit mixing after Chris Wellons' ``lowbias32`` search (https://nullprogram.com/blog/2018/07/31/), once with each half of the key.
    """
    low = (keys & 0xFFFFFFFF).to(torch.int32)
    high = (keys >> 32).to(torch.int32)
    columns = torch.arange(width, dtype=torch.int32, device=keys.device).mul_(_signed_32(0x9E3779B1))
    bits = columns ^ low[:, None]
    scratch = torch.empty_like(bits)
    _mix_32(bits, scratch)
    bits.add_(high[:, None])
    _mix_32(bits, scratch)
    uniform = bits.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31)
    # Near 0, where races are won, floats are dense: log1p keeps their resolution.
    return uniform.neg_().log1p_().neg_()


def _mix_32(bits: torch.Tensor, scratch: torch.Tensor) -> None:
    """A bijection of 32-bit words, in place. Shifts of signed words drag the sign along; the masks cut it off."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        torch.bitwise_right_shift(bits, shift, out=scratch)
        bits.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1)).mul_(_signed_32(factor))
    torch.bitwise_right_shift(bits, 15, out=scratch)
    bits.bitwise_xor_(scratch.bitwise_and_((1 << 17) - 1))


def _mix_64(words: torch.Tensor) -> torch.Tensor:
    """The output function of splitmix64 on int64 words (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    words = words + _signed(_GOLDEN_64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ ((words >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return words ^ ((words >> 31) & ((1 << 33) - 1))


def _signed(word: int) -> int:
    """The two's complement reading of an unsigned 64-bit word."""
    return word - (1 << 64) if word >> 63 else word


def _signed_32(word: int) -> int:
    """The same of 32 bits."""
    return word - (1 << 32) if word >> 31 else word
