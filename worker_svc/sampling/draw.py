"""Draws a token from each row, with random numbers hashed from (seed, sequence, position).

The drawn token is the first, in the order of token ids, at which the running sum of masses exceeds a random
number in [0, total). Masses are integers, so their sum does not depend on the order of additions. The same
row therefore gives the same token in any batch and on any device.
"""

import torch

# Masses are first summed within blocks of this many tokens.
_BLOCK = 128

_MASK_64 = (1 << 64) - 1
_GOLDEN_64 = 0x9E3779B97F4A7C15


def sequence_seed(seed: int, sequence: int) -> int:
    """Returns the seed of one of a request's sequences as a signed 64-bit word; `seed` is unsigned."""
    return _signed((seed + sequence * _GOLDEN_64) & _MASK_64)


def uniform(seeds: torch.Tensor, positions: torch.Tensor, attempt: int = 0) -> torch.Tensor:
    """Returns random numbers in [0, 1), float64 [rows].

    Each is a hash of its row's seed and position, int64 [rows] both, and of `attempt`.
    """
    words = _mix_64(_mix_64(seeds) + positions)
    if attempt:
        words = _mix_64(words + attempt)
    return ((words >> 11) & ((1 << 53) - 1)).double().mul_(2.0**-53)


def draw(mass: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Draws one token per row, with probability proportional to its mass.

    Args:
        mass: int64 [rows, vocab], non-negative; each row's sum is below 2**63.
        numbers: float64 [rows] in [0, 1).

    Returns:
        int64 [rows]. A row without any mass gets an arbitrary token of the vocabulary.
    """
    rows, vocab = mass.shape
    if vocab % _BLOCK:
        mass = torch.nn.functional.pad(mass, (0, _BLOCK - vocab % _BLOCK))
    blocks = mass.view(rows, -1, _BLOCK)
    sums = blocks.sum(dim=-1)
    ends = sums.cumsum(dim=-1)
    total = ends[:, -1:]
    # For totals above 2**53 the product skips some integers; the error is one in 2**53.
    target = torch.minimum((numbers[:, None] * total).long(), total - 1)
    block = (ends <= target).sum(dim=-1, keepdim=True).clamp_(max=blocks.shape[1] - 1)
    start = ends.gather(1, block) - sums.gather(1, block)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].cumsum(dim=-1).add_(start)
    offset = (inside <= target).sum(dim=-1)
    return (block[:, 0] * _BLOCK + offset).clamp_(max=vocab - 1)


def _mix_64(words: torch.Tensor) -> torch.Tensor:
    """Applies the output function of splitmix64 to int64 words.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    words = words + _signed(_GOLDEN_64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ ((words >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return words ^ ((words >> 31) & ((1 << 33) - 1))


def _signed(word: int) -> int:
    """Reinterprets an unsigned 64-bit word as two's complement."""
    return word - (1 << 64) if word >> 63 else word
