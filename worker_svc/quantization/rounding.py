"""Quantizes weights by rounding them to the nearest code, without calibration data."""

from typing import Final

import torch

from worker_svc.quantization.scheme import Scheme

# With clipping, the largest code stands for these shares of the largest weight.
_SHARES: Final = tuple(1 - step / 40 for step in range(21))
_TINY: Final = 1e-12
# Rows that are rounded at a time: rounding takes several times their memory.
_ROWS: Final = 2048


def quantize(weight: torch.Tensor, scheme: Scheme, *, clip: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes a matrix.

    Args:
        weight: [outputs, inputs]; groups divide the inputs.
        scheme: of the result.
        clip: whether to choose each scale, out of 21, for the least squared error. A smaller scale clips the
            largest weights and rounds all others more finely.

    Returns:
        Codes, uint8 [outputs, inputs], and scales, in the weight's type [outputs, groups].
    """
    parts = [_quantized(rows, scheme, clip=clip) for rows in weight.split(_ROWS)]
    codes, scales = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(scales)


def _quantized(weight: torch.Tensor, scheme: Scheme, *, clip: bool) -> tuple[torch.Tensor, torch.Tensor]:
    outputs, inputs = weight.shape
    half = 2 ** (scheme.bits - 1)
    grouped = weight.float().view(outputs, scheme.groups(inputs), -1)
    widest = grouped.abs().amax(dim=-1, keepdim=True).clamp_(min=_TINY) / (half - 0.5)
    least = torch.full_like(widest, float("inf"))
    codes, scales = torch.zeros_like(grouped), torch.ones_like(widest)
    smallest = torch.finfo(weight.dtype).tiny  # tinier scales become 0 in some types
    for share in _SHARES if clip else (1.0,):
        # Scales are stored in the weight's type, so the codes must fit the rounded scale.
        scale = (widest * share).to(weight.dtype).float().clamp_(min=smallest)
        tried = torch.round(grouped / scale).clamp_(-half, half - 1)
        error = (tried * scale - grouped).square_().sum(dim=-1, keepdim=True)
        better = error < least
        least = torch.where(better, error, least)
        codes = torch.where(better, tried, codes)
        scales = torch.where(better, scale, scales)
    return (codes + half).to(torch.uint8).view(outputs, inputs), scales.squeeze(-1).to(weight.dtype)
