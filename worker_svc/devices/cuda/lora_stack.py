"""LoRA adapters of a layer on a GPU: the A matrices join the layer's weights, a Triton kernel does the rest.

The A matrices of all adapters follow the layer's own weights, so a single product computes the layer's
outputs and the A matrices' products. The kernel then adds the product with the B matrices of each row's
adapter. A step with adapters launches a small kernel more for each layer, and launches are its cost.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional

from worker_svc.devices.lora_stack import MOST_PARTS, LayerWeights, LoraStack, StackShape


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


# Outputs and rows of a program; the fewest rows that tensor cores take.
_BLOCK, _ROWS = 64, 16
_MOST_COLUMNS = 128


class TritonStack(LoraStack):
    """A layer's adapters. A selection is the rows' adapter slots, int32 [tokens]."""

    def __init__(self, shape: StackShape, device: torch.device) -> None:
        """Starts with zeros in every slot."""
        a, b = (torch.zeros(size, dtype=shape.dtype, device=device) for size in self.sizes(shape))
        super().__init__(shape, a, b)
        self._joined: torch.Tensor | None = None

    @staticmethod
    def sizes(shape: StackShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of the two tensors: [parts * slots * rank, in] and [out, slots * rank]."""
        parts = len(shape.out_sizes)
        return (parts * shape.columns, shape.in_size), (sum(shape.out_sizes), shape.columns)

    def join(self, weight: torch.nn.Parameter) -> None:
        """Moves the layer's weights [out, in] in front of the A matrices, for a single product."""
        if weight.dtype != self._shape.dtype or weight.shape[1] != self._shape.in_size:
            return
        self._joined = torch.cat([weight.data, self._a])
        weight.data, self._a = self._joined.split([weight.shape[0], self._a.shape[0]])

    def write(self, slot: int, weights: LayerWeights) -> None:
        shape, first_out = self._shape, 0
        columns = slice(slot * shape.rank, (slot + 1) * shape.rank)
        for part, (size, matrices) in enumerate(zip(shape.out_sizes, weights, strict=True)):
            first = part * shape.columns + columns.start
            a, b = self._padded(size, matrices)
            self._a[first : first + shape.rank].copy_(a)
            self._b[first_out : first_out + size, columns].copy_(b)
            first_out += size

    def apply(
        self, product: Any, x: torch.Tensor, bias: torch.Tensor | None, selection: torch.Tensor
    ) -> torch.Tensor:
        if self._joined is None:
            base = product()
            inner, bias = functional.linear(x.to(self._shape.dtype), self._a), None
        else:
            base, inner = functional.linear(x, self._joined).split(
                [sum(self._shape.out_sizes), self._a.shape[0]], dim=-1
            )
        result: torch.Tensor = torch.ops.triptych_cuda.lora_expand(
            base, inner, self._b, selection, bias, self._shape.out_sizes, self._shape.rank
        )
        return result


def _expand(
    base: torch.Tensor, inner: torch.Tensor, b: torch.Tensor, slots: torch.Tensor, bias: torch.Tensor | None,
    sizes: Sequence[int], rank: int,
) -> torch.Tensor:  # fmt: skip
    rows, columns = base.shape[0], b.shape[1]
    out = _empty_like_base(base)
    tile = min(_MOST_COLUMNS, max(16, 1 << (columns - 1).bit_length()))
    ends = [*itertools.accumulate(sizes)]
    ends += ends[-1:] * (MOST_PARTS - len(ends))
    expand_kernel[sum(-(-size // _BLOCK) for size in sizes), -(-rows // _ROWS)](
        base, inner, b, slots, bias, out, rows, base.stride(0), inner.stride(0), out.stride(0), *ends,
        COLUMNS=columns, RANK=rank, HAS_BIAS=bias is not None, ROWS=_ROWS, N=_BLOCK, K=tile,
    )  # fmt: skip
    return out


def _empty_like_base(base: torch.Tensor, *_: Any) -> torch.Tensor:
    return base.new_empty(base.shape)


torch.library.define(
    "triptych_cuda::lora_expand",
    "(Tensor base, Tensor inner, Tensor b, Tensor slots, Tensor? bias, int[] sizes, int rank) -> Tensor",
)
for _key in ("CUDA", "CPU"):  # Triton's interpreter runs on the host
    torch.library.impl("triptych_cuda::lora_expand", _key, _expand)
torch.library.register_fake("triptych_cuda::lora_expand", _empty_like_base)
