"""Products with quantized weights on GPUs: our Triton kernels as an operator, so that graphs record them."""

from typing import Any

import torch

from worker_svc.devices.quantized import (
    SCALE_BYTES,
    PlainQuantizedLinear,
    QuantizedProducts,
    QuantizedWeights,
    activation_rows,
)

# Inputs of a tile of the kernels' lanes, by bits.
_TILE_INPUTS = {4: 128, 8: 64}
# Inputs of a group that the kernels take. Other groups would begin or end within a tile, or a place of one.
_GROUPS = (32, 64, 128)


class TritonProducts(QuantizedProducts):
    """Packs weights for our kernels."""

    def num_bytes(self, outputs: int, inputs: int, groups: int, bits: int, dtype: torch.dtype) -> int:
        if not _serves(inputs, groups, dtype):
            return super().num_bytes(outputs, inputs, groups, bits, dtype)
        padded = -(-inputs // _TILE_INPUTS[bits]) * _TILE_INPUTS[bits]
        return outputs * (padded * bits // 8 + groups * SCALE_BYTES)

    def layer(self, weights: QuantizedWeights, dtype: torch.dtype, *, wide: bool) -> torch.nn.Module:
        del wide
        if not _serves(weights.codes.shape[1], weights.scales.shape[1], dtype):
            return PlainQuantizedLinear(weights, dtype)
        return _TritonQuantizedLinear(weights, dtype)


def _serves(inputs: int, groups: int, dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16) and (groups == 1 or inputs // groups in _GROUPS)


class _TritonQuantizedLinear(torch.nn.Module):
    """A product in our kernels."""

    def __init__(self, weights: QuantizedWeights, dtype: torch.dtype) -> None:
        """Packs the weights; scales get the type of activations."""
        super().__init__()
        # Imported here, because Triton is missing or slow to import on machines without a GPU.
        from worker_svc.devices.cuda import triton_quantized

        self._bits = weights.bits
        self._lanes = torch.nn.Parameter(triton_quantized.pack(weights), requires_grad=False)
        self._scales = torch.nn.Parameter(weights.scales.to(dtype).contiguous(), requires_grad=False)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Maps [..., inputs] to [..., outputs]."""
        rows = activation_rows(x, self._scales.dtype)
        product: torch.Tensor = torch.ops.triptych_cuda.quantized_linear(
            rows, self._lanes, self._scales, self._bits, bias
        )
        return product.view(*x.shape[:-1], product.shape[-1])


def _run(
    x: torch.Tensor, lanes: torch.Tensor, scales: torch.Tensor, bits: int, bias: torch.Tensor | None
) -> torch.Tensor:
    from worker_svc.devices.cuda import triton_quantized

    return triton_quantized.multiply(x, lanes, scales, bits, bias)


def _shape(x: torch.Tensor, lanes: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty((x.shape[0], lanes.shape[0]))


torch.library.define(
    "triptych_cuda::quantized_linear",
    "(Tensor x, Tensor lanes, Tensor scales, int bits, Tensor? bias) -> Tensor",
)
torch.library.impl("triptych_cuda::quantized_linear", "CUDA", _run)
torch.library.register_fake("triptych_cuda::quantized_linear", _shape)
