"""Drops unlikely tokens: `min_p`, `top_k`, then `top_p` over the remaining tokens.

Each filter is a threshold on the tokens' weights, `exp(logit - largest logit)`. Tokens of equal weight,
common in bfloat16, are therefore kept or dropped together, whatever their order. The threshold of `top_k` is
the largest value reached by at least `k` tokens, that of `top_p` the largest value whose reaching tokens
have the required mass.

Both are found exactly and without sorting. The bits of a float in [0, 1] order like its value. A histogram
of the highest ten bits finds a bin, the second refines it by the next ten bits, the third by the last ten:
three passes for any distribution. GPUs find the same threshold with sums (`triton_search`): histogram
atomics would contend for the few bins that hold most tokens.

If every `top_k` of a step is small, its threshold is searched among the few largest weights. The same holds
for `top_p` if every row with a `top_p` has a small `top_k`, because every token above one that `top_k` keeps
is among them. The thresholds are the same either way.
"""

from dataclasses import dataclass

import torch

from worker_svc.devices.base import is_host
from worker_svc.sampling.workspace import Tile

# The integer mass of weight 1. The sum over 2**18 tokens stays below 2**63.
_ONE = 2.0**44
# A float32 in [0, 1] has 30 bits that vary: three passes of ten.
_SHIFTS = (20, 10, 0)
_BINS = 1 << 10

FEW = 64
"""The largest `top_k` that counts as small."""


def apply_filters(
    tile: Tile,
    min_p: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    *,
    few: bool = False,
    nucleus_in_few: bool = False,
) -> torch.Tensor:
    """Applies the filters and returns the masses of the kept tokens, 0 for dropped tokens.

    Args:
        tile: its `weights` [rows, vocab] are in [0, 1], and each row's largest is 1. Its other tensors are
            overwritten.
        min_p: float32 [rows]: drops tokens with a smaller weight. `None` without the filter in any row.
        top_k: int64 [rows], at least 1: number of tokens to keep; the vocabulary's size keeps all. `None`
            likewise.
        top_p: float64 [rows], at most 1: share of the mass to keep. `None` likewise.
        few: whether each `top_k` is at most `FEW` or keeps all tokens.
        nucleus_in_few: whether each row with a `top_p` below 1 also has a `top_k` of at most `FEW`.

    Returns:
        int64 [rows, vocab], in the tile: 2**44 times the weights. Weights below 2**-44 get no mass.
    """
    bits = tile.weights.view(torch.int32)
    mass = tile.mass.copy_(torch.mul(tile.weights, _ONE, out=tile.logits))
    floor = None if min_p is None else min_p.view(torch.int32)[:, None]
    top = _TopWeights.of(tile.weights, top_k) if top_k is not None and few else None
    if top_k is not None:
        kth = top.kth() if top is not None else find_threshold(bits, None, top_k[:, None], tile)
        floor = kth if floor is None else torch.maximum(floor, kth)
    if floor is not None:
        _drop_below(floor, bits, tile)
    if top_p is not None:
        total = mass.sum(dim=-1, keepdim=True)
        wanted = torch.minimum((top_p[:, None] * total).ceil_().long(), total)
        if top is not None and nucleus_in_few:
            nucleus = top.nucleus_threshold(mass, wanted)
        else:
            nucleus = find_threshold(bits, mass, wanted, tile)
        _drop_below(nucleus, bits, tile)
    return mass


@dataclass(frozen=True)
class _TopWeights:
    """The few largest weights of each row, for rows that keep at most so many tokens, or all."""

    weights: torch.Tensor
    """float32 [rows, few], largest first."""
    tokens: torch.Tensor
    """int64 [rows, few], their tokens."""
    top_k: torch.Tensor
    """int64 [rows, 1]."""

    @classmethod
    def of(cls, weights: torch.Tensor, top_k: torch.Tensor) -> "_TopWeights":
        """Finds the `FEW` largest weights."""
        values, ids = weights.topk(min(FEW, weights.shape[1]), dim=-1)
        return cls(values, ids, top_k[:, None])

    def kth(self) -> torch.Tensor:
        """Returns the bits of each row's k-th largest weight, int32 [rows, 1]; 0 to keep all tokens."""
        return self._bits(self.weights.gather(1, self.top_k.clamp(max=self.weights.shape[1]) - 1))

    def nucleus_threshold(self, mass: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Does the same as `find_threshold`, once the mass of tokens below `kth` is 0."""
        found = mass.gather(1, self.tokens)
        # Among equal weights the first decides, because only larger weights precede it.
        outside = found.cumsum(dim=1).sub_(found) >= wanted
        return self._bits(self.weights.masked_fill(outside, torch.inf).amin(dim=1, keepdim=True))

    def _bits(self, threshold: torch.Tensor) -> torch.Tensor:
        return threshold.masked_fill(self.top_k > FEW, 0.0).view(torch.int32)


def find_threshold(
    bits: torch.Tensor, measure: torch.Tensor | None, wanted: torch.Tensor, tile: Tile
) -> torch.Tensor:
    """Returns the largest value whose reaching tokens sum up to `wanted`.

    Args:
        bits: int32 [rows, vocab], the bits of floats in [0, 1].
        measure: int64 [rows, vocab], the summand of each token; `None` counts each token as 1.
        wanted: int64 [rows, 1], at least 1.
        tile: its `logits`, `words` and `places` are overwritten.

    Returns:
        int32 [rows, 1], the bits of the value; 0 or less where all tokens together have less than `wanted`.
    """
    if not is_host(bits.device):
        from worker_svc.sampling import triton_search

        return triton_search.find_threshold(bits, measure, wanted)
    if measure is None:
        measure = tile.logits.view(torch.int32).fill_(1)
    base = torch.zeros((bits.shape[0], 1), dtype=torch.int32, device=bits.device)
    for shift in _SHIFTS:
        # The first bin takes tokens below the searched range, the last bin tokens above it.
        bins = torch.bitwise_right_shift(bits, shift, out=tile.words).sub_(base).clamp_(-1, _BINS).add_(1)
        histogram = measure.new_zeros((bits.shape[0], _BINS + 2))
        histogram.scatter_add_(1, tile.places.copy_(bins), measure)
        from_above = histogram.flip(1).cumsum(1)
        too_few = (from_above < wanted).sum(dim=1, keepdim=True, dtype=torch.int32)
        # Bins count from 1; the `too_few` highest bins sum up to less than wanted.
        base = (base + _BINS - too_few) << (10 if shift else 0)
    return base


def _drop_below(floor: torch.Tensor, bits: torch.Tensor, tile: Tile) -> None:
    """Sets the mass of tokens below a row's threshold to 0. `floor` holds float bits, int32 [rows, 1].

    It ands the mass with the inverted sign of the difference: all bits set for kept tokens.
    """
    kept = torch.sub(bits, floor, out=tile.words).bitwise_right_shift_(31).bitwise_not_()
    tile.mass.bitwise_and_(tile.places.copy_(kept))
