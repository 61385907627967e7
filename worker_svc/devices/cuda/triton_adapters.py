"""The products of LoRA adapters on GPUs, in a Triton kernel after a larger product.

The A matrices of all adapters follow the layer's own weights, so a single product computes the layer's
outputs and the A matrices' products. The kernel then adds the product with the B matrices of each row's
adapter. A step with adapters launches a small kernel more for each layer, and launches are its cost.
"""

import triton
import triton.language as tl


@triton.jit
def expand_kernel(
    base, inner, b, slots, bias, out, rows, base_row, inner_row, out_row,
    END0: tl.constexpr, END1: tl.constexpr, END2: tl.constexpr, END3: tl.constexpr,
    COLUMNS: tl.constexpr, RANK: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Adds the adapters' products to a layer's outputs. Grid: blocks of up to N outputs, tiles of ROWS rows.

    `base` has the layer's outputs and `inner` the products with the A matrices, COLUMNS for each part of the
    layer. `b` is [outputs, COLUMNS]. The parts end at END0 to END3, and a block never spans two of them. No
    load waits for the result of another.
    """
    BLOCKS0: tl.constexpr = (END0 + N - 1) // N  # noqa: N806 - constants
    BLOCKS1: tl.constexpr = BLOCKS0 + (END1 - END0 + N - 1) // N  # noqa: N806
    BLOCKS2: tl.constexpr = BLOCKS1 + (END2 - END1 + N - 1) // N  # noqa: N806
    block = tl.program_id(0)
    part, first, begin, end = 0, 0, 0, END0
    if block >= BLOCKS2:
        part, first, begin, end = 3, BLOCKS2, END2, END3
    elif block >= BLOCKS1:
        part, first, begin, end = 2, BLOCKS1, END1, END2
    elif block >= BLOCKS0:
        part, first, begin, end = 1, BLOCKS0, END0, END1
    column = begin + (block - first) * N + tl.arange(0, N)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there, inside = row < rows, column < end
    mask = there[:, None] & inside[None, :]
    slot = tl.load(slots + row, mask=there, other=-1)
    sums = tl.load(base + row[:, None] * base_row + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    for start in range(0, COLUMNS, K):
        k = start + tl.arange(0, K)
        real = k < COLUMNS
        left = tl.load(
            inner + row[:, None] * inner_row + part * COLUMNS + k[None, :],
            mask=there[:, None] & real[None, :],
            other=0.0,
        )
        right = tl.load(
            b + column[None, :] * COLUMNS + k[:, None], mask=inside[None, :] & real[:, None], other=0.0
        )
        # Products with other rows' adapters may be anything.
        left = tl.where(k[None, :] // RANK == slot[:, None], left, 0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    tl.store(out + row[:, None] * out_row + column[None, :], sums.to(out.dtype.element_ty), mask=mask)
