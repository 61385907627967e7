"""Quantization schemes, codes of 4 or 8 bits in 32-bit words, and rounding of weights to codes.

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


SHARES: Final = tuple(1 - step / 40 for step in range(21))
"""Values of the largest code to try, as shares of a group's largest weight."""
_TINY: Final = 1e-12
# Rows per step; rounding takes several times their memory.
_ROWS: Final = 2048


def quantize(weight: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes a matrix, [outputs, inputs], with groups that divide the inputs.

    Each group tries 21 scales and keeps the scale with the least squared error. A smaller scale clips the
    largest weights and rounds all others more finely.

    Returns:
        Codes, uint8 [outputs, inputs], and scales, in the weight's type [outputs, groups].
    """
    parts = [_quantized(rows, scheme) for rows in weight.split(_ROWS)]
    codes, scales = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(scales)


def _quantized(weight: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    search = ScaleSearch(weight, scheme)
    for share in SHARES:
        search.attempt(search.widest * share)
    codes = (search.codes + 2 ** (scheme.bits - 1)).to(torch.uint8)
    return codes.view(weight.shape), search.scales.squeeze(-1).to(weight.dtype)


class ScaleSearch:
    """Keeps the scale with the least squared error for each group."""

    grouped: torch.Tensor
    """The weights, float32 [outputs, groups, inputs of a group]."""
    widest: torch.Tensor
    """The smallest scale of each group without clipping, float32 [outputs, groups, 1]."""
    scales: torch.Tensor
    """The best scales so far, of that shape; none is zero."""
    codes: torch.Tensor
    """Their codes, around 0, in the shape of the weights."""

    def __init__(self, weight: torch.Tensor, scheme: Scheme, importance: torch.Tensor | None = None) -> None:
        """Starts without a scale.

        `importance` are factors of the squared errors, float32 [groups, inputs of a group]; by default 1.
        """
        outputs, inputs = weight.shape
        self._half, self._dtype, self._importance = 2 ** (scheme.bits - 1), weight.dtype, importance
        self.grouped = weight.float().view(outputs, scheme.groups(inputs), -1)
        largest = self.grouped.abs().amax(dim=-1, keepdim=True)
        self.widest = largest.clamp_(min=_TINY) / (self._half - 0.5)
        self.scales, self.codes = torch.ones_like(self.widest), torch.zeros_like(self.grouped)
        self._least = torch.full_like(self.widest, float("inf"))

    def attempt(self, wanted: torch.Tensor) -> None:
        """Tries a scale for each group, of the shape of `widest`; it may be negative."""
        stored = wanted.to(self._dtype).float()
        smallest = torch.finfo(self._dtype).tiny  # tinier scales become 0 in some types
        scale = torch.where(stored.abs() < smallest, torch.full_like(stored, smallest), stored)
        tried = torch.round(self.grouped / scale).clamp_(-self._half, self._half - 1)
        errors = (tried * scale - self.grouped).square_()
        if self._importance is not None:
            errors.mul_(self._importance)
        error = errors.sum(dim=-1, keepdim=True)
        better = error < self._least
        self._least = torch.where(better, error, self._least)
        self.scales = torch.where(better, scale, self.scales)
        self.codes = torch.where(better, tried, self.codes)
