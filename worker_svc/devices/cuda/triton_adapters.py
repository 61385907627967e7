"""The products of LoRA adapters on GPUs, in one Triton kernel behind a larger product.

The A matrices of all adapters lie behind the layer's own weights, so one product computes the layer's
outputs and what the A matrices make of its inputs. The kernel then adds the product with the B matrices of
each row's adapter. A step with adapters launches one small kernel more for each layer: launches are what it
waits for.
"""

import triton
import triton.language as tl


@triton.jit
def expand_kernel(
    base, inner, b, slots, bias, blocks, out, rows, base_row, inner_row, out_row,
    COLUMNS: tl.constexpr, RANK: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Adds the adapters' products to the layer's outputs. Grid: blocks of at most N outputs, tiles of ROWS rows.

    `base` has the layer's outputs and `inner` the products with the A matrices, COLUMNS for each part of the
    layer. `b` is [outputs, COLUMNS]. `blocks` has for each block its part, its first output and the end of its
    outputs.
    """
    block = tl.program_id(0) * 3
    part, first, end = tl.load(blocks + block), tl.load(blocks + block + 1), tl.load(blocks + block + 2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    column = first + tl.arange(0, N)
    inside = column < end
    slot = tl.load(slots + row, mask=there, other=-1)
    sums = tl.zeros([ROWS, N], tl.float32)
    for start in range(0, COLUMNS, K):
        k = start + tl.arange(0, K)
        # Columns of other rows' adapters may be anything.
        own = (k[None, :] // RANK == slot[:, None]) & (k < COLUMNS)[None, :]
        left = tl.load(inner + row[:, None] * inner_row + part * COLUMNS + k[None, :], mask=own, other=0.0)
        right = tl.load(
            b + column[None, :] * COLUMNS + k[:, None],
            mask=inside[None, :] & (k < COLUMNS)[:, None],
            other=0.0,
        )
        sums = tl.dot(left, right, sums, input_precision="ieee")
    mask = there[:, None] & inside[None, :]
    sums += tl.load(base + row[:, None] * base_row + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(out + row[:, None] * out_row + column[None, :], sums.to(out.dtype.element_ty), mask=mask)
