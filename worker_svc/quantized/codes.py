"""Quantization schemes, and their codes of 4 or 8 bits packed into 32-bit words.

A word holds consecutive inputs of an output channel, the first in its lowest bits, as compressed-tensors and
GPTQ store them. Codes are stored without sign: half of the range stands for 0.
"""

from dataclasses import dataclass
from typing import Final, Literal

import torch

Bits = Literal[4, 8]

GROUPS: Final = (32, 64, 128)
"""Inputs that may share a scale; or all inputs of an output channel."""
_NIBBLE: Final = 4


@dataclass(frozen=True)
class Scheme:
    """Symmetric integers: a weight is its scale times its code, an integer from -2**(bits-1)."""

    bits: Bits
    """Bits of a code."""
    group: int | None
    """Consecutive inputs with the same scale; `None` for all inputs of an output channel."""

    def __str__(self) -> str:
        """Returns words for people, for example "w4a16 in groups of 64"."""
        return f"w{self.bits}a16 {'per channel' if self.group is None else f'in groups of {self.group}'}"

    def groups(self, inputs: int) -> int:
        """Returns the number of scales of an output channel."""
        return 1 if self.group is None else inputs // self.group


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs codes, uint8 [outputs, inputs], into words, int32 [outputs, inputs * bits / 32].

    The inputs must fill whole words.
    """
    if bits == _NIBBLE:
        codes = codes[:, 0::2] | (codes[:, 1::2] << _NIBBLE)
    return codes.contiguous().view(torch.int32)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Reverses `pack`."""
    codes = words.contiguous().view(torch.uint8)
    if bits == _NIBBLE:
        codes = torch.stack((codes & 0xF, codes >> _NIBBLE), dim=-1).flatten(1)
    return codes


def dequantize(codes: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns weights, float32 [outputs, inputs], from codes of that shape and scales [outputs, groups]."""
    outputs, inputs = codes.shape
    values = codes.view(outputs, scales.shape[1], -1).float() - 2 ** (bits - 1)
    weights: torch.Tensor = values * scales.float().unsqueeze(-1)
    return weights.view(outputs, inputs)
