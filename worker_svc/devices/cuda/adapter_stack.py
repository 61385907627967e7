"""LoRA adapters of a layer on a GPU: the A matrices join the layer's weights, a kernel does the rest."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from worker_svc.devices.adapter_stack import MOST_PARTS, AdapterStack, LayerWeights, StackShape

# Outputs and rows of a program; the fewest rows that tensor cores take.
_BLOCK, _ROWS = 64, 16
_MOST_COLUMNS = 128


class TritonStack(AdapterStack):
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
        """See the base class."""
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
        """See the base class."""
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
    from worker_svc.devices.cuda.triton_adapters import expand_kernel

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
