"""The search for a threshold on GPUs: what ``filters.find_threshold`` finds, without histograms, whose atomics queue up for the bins that most tokens are in.

The 30 bits that vary of a float in [0, 1] are found three at a time. In one launch per three bits, all processors add up, over a row's
tokens, what reaches each of the seven values that those bits may have; the next launch reads off the sums how far its predecessors got.
Sums are of integers, so they are the same in whichever order programs add them.
"""

import torch
import triton
import triton.language as tl

BITS = 3
_PASSES = 30 // BITS
# Tokens of a program: few enough that a step of few rows keeps all processors busy.
_TOKENS = 2048
_WARPS = 4


@triton.jit
def _found(sums, wanted, BEFORE: tl.constexpr, BITS: tl.constexpr, PASSES: tl.constexpr):
    """The bits that the passes before this one found, of the highest ones."""
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
    """One program adds up some of a row's tokens, for each value that the pass' bits may have."""
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
def _tell(wanted, sums, found, BITS: tl.constexpr, PASSES: tl.constexpr):
    row = tl.program_id(0)
    base = _found(sums + row.to(tl.int64) * (PASSES << BITS), tl.load(wanted + row), PASSES, BITS, PASSES)
    tl.store(found + row, base)


def find_threshold(bits: torch.Tensor, measure: torch.Tensor | None, wanted: torch.Tensor) -> torch.Tensor:
    """Like ``filters.find_threshold``.

    Args:
        bits: int32 [rows, vocab], contiguous.
        measure: int64 [rows, vocab], contiguous; ``None``: each token has 1.
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
    _tell[(rows,)](wanted, sums, found, BITS=BITS, PASSES=_PASSES, num_warps=1)
    return found
