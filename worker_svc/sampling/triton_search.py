"""The threshold search of `filters.find_threshold` on GPUs.

It uses sums instead of histograms: histogram atomics contend for the few bins that hold most tokens. A float
in [0, 1] varies in 30 bits; each kernel launch finds three. Its programs sum, for each of the seven non-zero
values of those bits, the measure of the row's reaching tokens. The next launch reads the bits found so far
from these sums. Sums are of integers, so they do not depend on the order of additions.
"""

import torch
import triton
import triton.language as tl

BITS = 3
"""Bits found per launch."""
_PASSES = 30 // BITS
# Tokens per program: small enough that a step with few rows still occupies all processors.
_TOKENS = 2048
_WARPS = 4


@triton.jit
def _found(sums, wanted, BEFORE: tl.constexpr, BITS: tl.constexpr, PASSES: tl.constexpr):
    """Reads the bits that the first BEFORE passes found from their sums."""
    base = 0
    for done in tl.static_range(BEFORE):
        digit = 0
        for value in tl.static_range(1, 1 << BITS):
            digit += (tl.load(sums + (done << BITS) + value) >= wanted).to(tl.int32)
        base += digit << (BITS * (PASSES - 1 - done))
    return base


@triton.jit
def _add_up(
    bits, measure, wanted, sums, vocab,
    PASS: tl.constexpr, BITS: tl.constexpr, PASSES: tl.constexpr, TOKENS: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """Sums a block of a row's tokens for each possible value of this pass' bits."""
    row = tl.program_id(0).to(tl.int64)
    sums += row * (PASSES << BITS)
    base = _found(sums, tl.load(wanted + row), PASS, BITS, PASSES)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    inside = tokens < vocab
    reached = tl.load(bits + row * vocab + tokens, mask=inside, other=-1)
    have = inside.to(tl.int64) if COUNTS else tl.load(measure + row * vocab + tokens, mask=inside, other=0)
    for value in tl.static_range(1, 1 << BITS):
        threshold = base + (value << (BITS * (PASSES - 1 - PASS)))
        total = tl.sum(tl.where(reached >= threshold, have, 0))
        if total != 0:
            tl.atomic_add(sums + (PASS << BITS) + value, total, sem="relaxed")


@triton.jit
def _store_found(wanted, sums, found, BITS: tl.constexpr, PASSES: tl.constexpr):
    row = tl.program_id(0)
    base = _found(sums + row.to(tl.int64) * (PASSES << BITS), tl.load(wanted + row), PASSES, BITS, PASSES)
    tl.store(found + row, base)


def find_threshold(bits: torch.Tensor, measure: torch.Tensor | None, wanted: torch.Tensor) -> torch.Tensor:
    """Does the same as `filters.find_threshold`.

    Args:
        bits: int32 [rows, vocab], contiguous.
        measure: int64 [rows, vocab], contiguous; `None` counts each token as 1.
        wanted: int64 [rows, 1].

    Returns:
        int32 [rows, 1].
    """
    rows, vocab = bits.shape
    sums = torch.zeros((rows, _PASSES << BITS), dtype=torch.int64, device=bits.device)
    found = torch.empty((rows, 1), dtype=torch.int32, device=bits.device)
    for number in range(_PASSES):
        _add_up[(rows, triton.cdiv(vocab, _TOKENS))](
            bits, bits if measure is None else measure, wanted, sums, vocab,
            PASS=number, BITS=BITS, PASSES=_PASSES, TOKENS=_TOKENS, COUNTS=measure is None, num_warps=_WARPS,
        )  # fmt: skip
    _store_found[(rows,)](wanted, sums, found, BITS=BITS, PASSES=_PASSES, num_warps=1)
    return found
