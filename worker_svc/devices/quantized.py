"""Products with quantized weights in plain PyTorch: for NPUs, and where a device has no kernel of its own."""

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True)
class QuantizedWeights:
    """A matrix of symmetric integers: a weight is its scale times its code less half of the codes' range."""

    codes: torch.Tensor
    """uint8 [outputs, inputs]."""
    scales: torch.Tensor
    """[outputs, groups]; groups of consecutive inputs, all of one size."""
    bits: int
    """Bits of a code, 4 or 8."""


class PlainQuantizedLinear(torch.nn.Module):
    """Dequantizes all weights for each product, in the form that the compiler of NPUs recognizes."""

    def __init__(self, weights: QuantizedWeights, dtype: torch.dtype) -> None:
        """Keeps one byte a weight.

        Args:
            weights: quantized.
            dtype: of the scales, and of activations.
        """
        super().__init__()
        half = 2 ** (weights.bits - 1)
        self.codes = torch.nn.Parameter((weights.codes.int() - half).to(torch.int8), requires_grad=False)
        self.scales = torch.nn.Parameter(weights.scales.to(dtype), requires_grad=False)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Maps [..., inputs] to [..., outputs]."""
        outputs, inputs = self.codes.shape
        groups = self.scales.shape[1]
        if groups == 1:
            weights = self.codes.type(x.dtype) * self.scales
        else:
            codes = self.codes.view(outputs, groups, inputs // groups)
            weights = (codes.type(x.dtype) * self.scales.unsqueeze(-1)).view(outputs, inputs)
        return functional.linear(x, weights, bias)
