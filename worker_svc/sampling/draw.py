"""Draws a token from each row by an exponential race, with numbers hashed from (seed, position, token).

In a race, each token finishes after an exponential time whose rate is its mass, and the first is drawn. So a
token's chance is its share of the mass. When masses change a little, as they do when a step of another shape
rounds differently, the outcome changes only if the two best times are that close. (An inverse CDF also moves
with every mass before the drawn token.)

A race over the whole vocabulary would hash every token. The same distribution takes two short races: between
blocks of tokens, with the blocks' masses, and between the tokens of the winning block. Masses are integers,
so the sums of blocks do not depend on the order of additions, and hashes are of integers, so they are the
same on every device.
"""

import torch

BLOCK = 256
"""Tokens of a block. Block i has the token ids from i * BLOCK on, whatever a request's filters keep."""


_MASK_64 = (1 << 64) - 1
_GOLDEN_64 = 0x9E3779B97F4A7C15
# Odd constants, so that no two of the small numbers that a key is made of give the same sum.
_POSITION_64 = 0xD1342543DE82EF95
_ATTEMPT_64 = 0xAF251AF3B0F025B5
_BLOCK_64 = 0xDA942042E4DD58B5
_TOKEN_64 = 0x9FB21C651E98DF25
_SHIFTS_AND_FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
# Bits of a random number. With half a step added it is exact in float64, and never 0 or 1.
_RANDOM_BITS = 52


def sequence_seed(seed: int, sequence: int) -> int:
    """Returns a hash of a request's seed and a sequence's number as a signed 64-bit word.

    Args:
        seed: unsigned, 64 bits.
        sequence: index of the sequence within the request.
    """
    word = (seed + (sequence + 1) * _GOLDEN_64) & _MASK_64
    for shift, factor in _SHIFTS_AND_FACTORS:
        word = (word ^ (word >> shift)) * factor & _MASK_64
    return _signed(word ^ (word >> _LAST_SHIFT))


def draw_keys(seeds: torch.Tensor, positions: torch.Tensor, attempt: int = 0) -> torch.Tensor:
    """Returns the keys of the rows' random numbers, int64 [rows].

    Args:
        seeds: the rows' `sequence_seed`, int64 [rows].
        positions: the positions of the drawn tokens in their sequences, int64 [rows].
        attempt: number of earlier draws for the same position.
    """
    return seeds + positions * _signed(_POSITION_64) + _signed(attempt * _ATTEMPT_64 & _MASK_64)


def draw(mass: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draws a token per row, with probability proportional to its mass.

    Args:
        mass: int64 [rows, vocab], non-negative; each row's sum is below 2**63.
        keys: the result of `draw_keys`, int64 [rows].

    Returns:
        int64 [rows]. A row without any mass gets token 0.
    """
    rows, vocab = mass.shape
    if vocab % BLOCK:
        mass = torch.nn.functional.pad(mass, (0, BLOCK - vocab % BLOCK))
    blocks = mass.view(rows, -1, BLOCK)
    # Counted from 1: no block has the key of token 0.
    numbers = torch.arange(1, blocks.shape[1] + 1, device=mass.device)
    block = _race(blocks.sum(dim=-1), keys[:, None] + numbers * _signed(_BLOCK_64))
    inside = blocks.gather(1, block[:, None, None].expand(-1, -1, BLOCK))[:, 0]
    tokens = block[:, None] * BLOCK + torch.arange(BLOCK, device=mass.device)
    offset = _race(inside, keys[:, None] + tokens * _signed(_TOKEN_64))
    return block * BLOCK + offset


def _race(mass: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Returns the winner of each row's race, int64 [rows]; 0 where no contender has any mass."""
    random = (_mix_64(keys) >> (64 - _RANDOM_BITS)) & ((1 << _RANDOM_BITS) - 1)
    uniform = random.double().add_(0.5).mul_(2.0**-_RANDOM_BITS)
    # The negative times: -infinity without mass.
    return uniform.log_().div_(mass).argmax(dim=-1)


def _mix_64(words: torch.Tensor) -> torch.Tensor:
    """Applies the output function of splitmix64 to int64 words.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    for shift, factor in _SHIFTS_AND_FACTORS:
        words = (words ^ ((words >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return words ^ ((words >> _LAST_SHIFT) & ((1 << (64 - _LAST_SHIFT)) - 1))


def _signed(word: int) -> int:
    """Reinterprets an unsigned 64-bit word as two's complement."""
    return word - (1 << 64) if word >> 63 else word
