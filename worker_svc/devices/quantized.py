"""Products with quantized weights: the interface to a device's kernels, and their form in plain PyTorch."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

SCALE_BYTES: Final = 2
"""Bytes of a scale in half precision."""


@dataclass(frozen=True)
class QuantizedWeights:
    """A matrix of symmetric integers: a weight is its scale times its code less half of the codes' range."""

    codes: torch.Tensor
    """uint8 [outputs, inputs]."""
    scales: torch.Tensor
    """[outputs, groups]; groups of consecutive inputs, all of the same size."""
    bits: int
    """Bits of a code, 4 or 8."""


def activation_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns activations [..., inputs] as [rows, inputs], for kernels that read contiguous rows.

    Raises:
        TypeError: if their type differs from the layer's, which such kernels would misread.
    """
    if x.dtype != dtype:
        raise TypeError(f"a layer for activations in {dtype} got activations in {x.dtype}")
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


class QuantizedProducts:
    """A device's products with quantized weights; by itself those in plain PyTorch, correct on any device."""

    def check(self, bits: Collection[int], groups: Collection[int | None]) -> None:
        """Checks that the device serves weights of this quantization, before any are loaded.

        Args:
            bits: bits of a code, of all layers.
            groups: inputs that share a scale, of all layers; `None` for a scale per output channel.

        Raises:
            ConfigurationRefused: names the unsupported part.
        """

    def num_bytes(self, outputs: int, inputs: int, groups: int, bits: int, dtype: torch.dtype) -> int:
        """Returns the memory of the result of `layer` for weights of these sizes."""
        del bits
        return outputs * (inputs + groups * dtype.itemsize)

    def layer(self, weights: QuantizedWeights, dtype: torch.dtype, *, wide: bool) -> torch.nn.Module:
        """Brings a layer's weights into the form that the device multiplies by; `wide` allows float32.

        Returns:
            A module whose forward takes activations [..., inputs] and a bias or `None`, and returns
            [..., outputs].
        """
        del wide
        return PlainQuantizedLinear(weights, dtype)


class PlainQuantizedLinear(torch.nn.Module):
    """Dequantizes all weights for each product, in the form that the compiler of NPUs recognizes."""

    def __init__(self, weights: QuantizedWeights, dtype: torch.dtype) -> None:
        """Keeps a byte per weight."""
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
