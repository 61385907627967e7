"""Linear layers in our own kernels: LoRA adapters, and quantized weights."""

from typing import Any

import torch

from worker_svc.devices.cpu.kernels import ops
from worker_svc.devices.cpu.kernels.program import PANEL
from worker_svc.devices.lora_stack import LayerWeights, LoraStack, StackShape
from worker_svc.devices.quantized import (
    SCALE_BYTES,
    QuantizedProducts,
    QuantizedWeights,
    activation_rows,
)

_own: Any = torch.ops.triptych_cpu


def serves_lora(shape: StackShape) -> bool:
    """Whether the kernels are available and serve such a layer."""
    return (
        shape.dtype == shape.activations == torch.bfloat16
        and shape.in_size % 2 == shape.rank % 2 == 0
        and ops.kernels() is not None
    )


class PackedStack(LoraStack):
    """A layer's adapters, packed. A selection is the rows' adapter slots, int32 [tokens]."""

    def __init__(self, shape: StackShape) -> None:
        """Starts with zeros in every slot."""
        self._columns = len(shape.out_sizes) * shape.rank
        a, b = (torch.zeros(size, dtype=shape.dtype) for size in self.sizes(shape))
        super().__init__(shape, a, b)

    @staticmethod
    def sizes(shape: StackShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of the two tensors: for each slot, panels of A and of each part's B in pairs."""
        panels = -(-len(shape.out_sizes) * shape.rank // PANEL)
        outs = sum(-(-size // PANEL) for size in shape.out_sizes)
        return (
            (shape.max_loras, panels, shape.in_size // 2, PANEL, 2),
            (shape.max_loras, outs, shape.rank // 2, PANEL, 2),
        )

    def write(self, slot: int, weights: LayerWeights) -> None:
        kernels = ops.kernels()
        assert kernels is not None
        shape = self._shape
        together = torch.zeros((self._columns, shape.in_size), dtype=shape.dtype)
        first = 0
        for part, (size, matrices) in enumerate(zip(shape.out_sizes, weights, strict=True)):
            together[part * shape.rank : (part + 1) * shape.rank], b = self._padded(size, matrices)
            packed = kernels.pack(b)
            self._b[slot, first : first + len(packed)] = packed
            first += len(packed)
        self._a[slot] = kernels.pack(together)

    def add(self, out: torch.Tensor, x: torch.Tensor, selection: torch.Tensor) -> torch.Tensor:
        shrunk = _own.lora_shrink(x, self._a, selection, self._columns)
        _own.lora_expand_(out, shrunk, self._b, selection, self._shape.out_sizes)
        return out


class CpuProducts(QuantizedProducts):
    """Packs weights for our kernel where it applies."""

    def num_bytes(self, outputs: int, inputs: int, groups: int, bits: int, dtype: torch.dtype) -> int:
        if not _serves(dtype):
            return super().num_bytes(outputs, inputs, groups, bits, dtype)
        return -(-outputs // PANEL) * PANEL * (inputs * bits // 8 + groups * SCALE_BYTES)

    def layer(self, weights: QuantizedWeights, dtype: torch.dtype, *, wide: bool) -> torch.nn.Module:
        return (
            _PackedQuantizedLinear(weights, wide=wide)
            if _serves(dtype)
            else super().layer(weights, dtype, wide=wide)
        )


def _serves(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and ops.kernels() is not None


class _PackedQuantizedLinear(torch.nn.Module):
    """A product in our own kernel."""

    def __init__(self, weights: QuantizedWeights, *, wide: bool) -> None:
        """Packs the weights; `wide` products are float32."""
        super().__init__()
        kernels = ops.kernels()
        assert kernels is not None
        self._bits, self._columns, self._wide = weights.bits, weights.codes.shape[0], wide
        packed, self._factor = kernels.pack_codes(weights.codes.contiguous(), weights.scales, weights.bits)
        self._packed = torch.nn.Parameter(packed, requires_grad=False)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Maps [..., inputs] to [..., outputs]."""
        product: torch.Tensor = torch.ops.triptych_cpu.quantized_linear(
            activation_rows(x, torch.bfloat16),
            self._packed,
            self._factor,
            self._bits,
            bias,
            self._columns,
            self._wide,
        )
        return product.view(*x.shape[:-1], self._columns)
