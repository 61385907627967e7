"""Drops unlikely tokens: ``min_p``, ``top_k``, then ``top_p`` over what is left.

Each of the three is a threshold on the tokens' weights, ``exp(logit - largest logit)``, so tokens of equal weight (common in bfloat16) are
kept or dropped together, whatever their order. The threshold of ``top_k`` is the largest value that at least ``k`` tokens reach, that
of ``top_p`` the largest value such that the tokens that reach it have at least the wanted mass. Both are found without sorting: the bits
of a float in [0, 1] are in the order of its value, so the search goes over histograms of the highest bits, then of the next within the
bin that was found, and once more: three passes whatever the distribution is, and exact. GPUs find the same by sums (``triton_search``), as
atomics would queue up for the few bins that most tokens are in.

Where every ``top_k`` of a step is small, its threshold is found among the few largest weights, and so is that of ``top_p`` where whoever
has one has such a ``top_k``, too: what is likelier than a token that ``top_k`` keeps is among them. The thresholds are the same.
"""

from dataclasses import dataclass

import torch

from worker_svc.sampling.workspace import Tile

# A weight of 1 as an integer mass. 2**18 tokens of it stay below 2**63.
_ONE = 2.0**44
# A float32 in [0, 1] has 30 bits that vary: three times ten.
_SHIFTS = (20, 10, 0)
_BINS = 1 << 10

FEW = 64
"""The largest ``top_k`` that is small."""


def apply_filters(
    tile: Tile,
    min_p: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    *,
    few: bool = False,
    nucleus_in_few: bool = False,
) -> torch.Tensor:
    """The masses of what is kept, 0 for the rest.

    Args:
        tile: whose ``weights`` [rows, vocab] are in [0, 1], with 1 as each row's largest. The rest of it is overwritten.
        min_p: float32 [rows]: tokens with less than this times the largest weight are dropped. ``None``: of no row.
        top_k: int64 [rows]: tokens that are kept, at least 1; the vocabulary's size for all. ``None``: of no row.
        top_p: float64 [rows]: share of the mass that is kept, at most 1. ``None``: of no row.
        few: whether each ``top_k`` is at most ``FEW`` or keeps all.
        nucleus_in_few: whether besides each row with a ``top_p`` below 1 has one that is at most ``FEW``.

    Returns:
        int64 [rows, vocab] in the tile: 2**44 times the weights. What is less than 2**-44 has none.
    """
    bits = tile.weights.view(torch.int32)
    mass = tile.mass.copy_(torch.mul(tile.weights, _ONE, out=tile.logits))
    floor = None if min_p is None else min_p.view(torch.int32)[:, None]
    likeliest = _Likeliest.of(tile.weights, top_k) if top_k is not None and few else None
    if top_k is not None:
        kth = likeliest.kth() if likeliest is not None else find_threshold(bits, None, top_k[:, None], tile)
        floor = kth if floor is None else torch.maximum(floor, kth)
    if floor is not None:
        _drop_below(floor, bits, tile)
    if top_p is not None:
        total = mass.sum(dim=-1, keepdim=True)
        wanted = torch.minimum((top_p[:, None] * total).ceil_().long(), total)
        if likeliest is not None and nucleus_in_few:
            nucleus = likeliest.find_threshold(mass, wanted)
        else:
            nucleus = find_threshold(bits, mass, wanted, tile)
        _drop_below(nucleus, bits, tile)
    return mass


@dataclass(frozen=True)
class _Likeliest:
    """The few largest weights of each row, [rows, few], largest first, for rows that keep no more of them, or all tokens."""

    weights: torch.Tensor
    tokens: torch.Tensor
    top_k: torch.Tensor
    """int64 [rows, 1]."""

    @classmethod
    def of(cls, weights: torch.Tensor, top_k: torch.Tensor) -> "_Likeliest":
        values, ids = weights.topk(min(FEW, weights.shape[1]), dim=-1)
        return cls(values, ids, top_k[:, None])

    def kth(self) -> torch.Tensor:
        """Bits of each row's k-th largest weight, int32 [rows, 1]; 0 for rows that keep all."""
        return self._bits(self.weights.gather(1, self.top_k.clamp(max=self.weights.shape[1]) - 1))

    def find_threshold(self, mass: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """The same as :func:`find_threshold`; ``mass`` of what :meth:`kth` drops is 0 already."""
        found = mass.gather(1, self.tokens)
        # Of equal tokens the first one counts: before it, there are only likelier ones.
        outside = found.cumsum(dim=1).sub_(found) >= wanted
        return self._bits(self.weights.masked_fill(outside, torch.inf).amin(dim=1, keepdim=True))

    def _bits(self, threshold: torch.Tensor) -> torch.Tensor:
        return threshold.masked_fill(self.top_k > FEW, 0.0).view(torch.int32)


def find_threshold(
    bits: torch.Tensor, measure: torch.Tensor | None, wanted: torch.Tensor, tile: Tile
) -> torch.Tensor:
    """The largest value such that the tokens that reach it have so much together.

    Args:
        bits: int32 [rows, vocab], those of floats in [0, 1].
        measure: int64 [rows, vocab], what each token has; ``None``: one.
        wanted: int64 [rows, 1], at least 1.
        tile: whose ``logits``, ``words`` and ``places`` are overwritten.

    Returns:
        int32 [rows, 1], the value's bits; 0 or less where all tokens together have less than what is wanted.
    """
    if bits.is_cuda:
        from worker_svc.sampling import triton_search

        return triton_search.find_threshold(bits, measure, wanted)
    if measure is None:
        measure = tile.logits.view(torch.int32).fill_(1)
    base = torch.zeros((bits.shape[0], 1), dtype=torch.int32, device=bits.device)
    for shift in _SHIFTS:
        # Bin 0 is what lies below those that are looked at, the last one what lies above.
        bins = torch.bitwise_right_shift(bits, shift, out=tile.words).sub_(base).clamp_(-1, _BINS).add_(1)
        histogram = measure.new_zeros((bits.shape[0], _BINS + 2))
        histogram.scatter_add_(1, tile.places.copy_(bins), measure)
        from_above = histogram.flip(1).cumsum(1)
        too_few = (from_above < wanted).sum(dim=1, keepdim=True, dtype=torch.int32)
        # Bins count from 1, those from above to the last one are too few together.
        base = (base + _BINS - too_few) << (10 if shift else 0)
    return base


def _drop_below(floor: torch.Tensor, bits: torch.Tensor, tile: Tile) -> None:
    """Takes the mass of tokens below a row's threshold (bits of a float, int32 [rows, 1]): ands it with the sign of how far they are above."""
    kept = torch.sub(bits, floor, out=tile.words).bitwise_right_shift_(31).bitwise_not_()
    tile.mass.bitwise_and_(tile.places.copy_(kept))
