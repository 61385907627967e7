"""Products with quantized weights on CPUs: our own kernel for bfloat16, else plain PyTorch."""

import torch

from worker_svc.devices.cpu.kernels import ops
from worker_svc.devices.cpu.kernels.program import PANEL
from worker_svc.devices.quantized import (
    SCALE_BYTES,
    QuantizedProducts,
    QuantizedWeights,
    activation_rows,
)


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
