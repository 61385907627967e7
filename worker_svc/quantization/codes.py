"""Packs codes of 4 or 8 bits into 32-bit words, as compressed-tensors and GPTQ do, and back.

A word holds consecutive inputs of one output channel, the first one in its lowest bits. A code is stored
without sign: half of its range stands for 0.
"""

import torch

_NIBBLE = 4


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs codes, uint8 [outputs, inputs], into words, int32 [outputs, inputs * bits / 32].

    The inputs must fill whole words.
    """
    if bits == _NIBBLE:
        codes = codes[:, 0::2] | (codes[:, 1::2] << _NIBBLE)
    return codes.contiguous().view(torch.int32)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Does the reverse of `pack`."""
    codes = words.contiguous().view(torch.uint8)
    if bits == _NIBBLE:
        codes = torch.stack((codes & 0xF, codes >> _NIBBLE), dim=-1).flatten(1)
    return codes


def dequantize(codes: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns weights, float32 [outputs, inputs].

    Args:
        codes: uint8 [outputs, inputs].
        scales: [outputs, groups].
        bits: of a code.
    """
    outputs, inputs = codes.shape
    values = codes.view(outputs, scales.shape[1], -1).float() - 2 ** (bits - 1)
    weights: torch.Tensor = values * scales.float().unsqueeze(-1)
    return weights.view(outputs, inputs)
