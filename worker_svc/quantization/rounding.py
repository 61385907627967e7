"""Quantizes weights by rounding them to the nearest code, without calibration data."""

from typing import Final

import torch

from worker_svc.quantization.scheme import Scheme

SHARES: Final = tuple(1 - step / 40 for step in range(21))
"""Shares of a group's largest weight that the largest code may stand for."""
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
    search = ScaleSearch(weight, scheme)
    for share in SHARES if clip else (1.0,):
        search.attempt(search.widest * share)
    codes = (search.codes + 2 ** (scheme.bits - 1)).to(torch.uint8)
    return codes.view(weight.shape), search.scales.squeeze(-1).to(weight.dtype)


class ScaleSearch:
    """Keeps, of the scales that are tried for each group, the one with the least squared error."""

    grouped: torch.Tensor
    """The weights, float32 [outputs, groups, inputs of a group]."""
    widest: torch.Tensor
    """The scale of each group that just holds its largest weight, float32 [outputs, groups, 1]."""
    scales: torch.Tensor
    """The best scales so far, of that shape; none is zero."""
    codes: torch.Tensor
    """Their codes, around 0, in the shape of the weights."""

    def __init__(self, weight: torch.Tensor, scheme: Scheme, importance: torch.Tensor | None = None) -> None:
        """Starts without a scale.

        Args:
            weight: [outputs, inputs]; scales are rounded to its type, in which they are stored.
            scheme: of the codes.
            importance: the weight of each input's errors, float32 [groups, inputs of a group]; by default 1.
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
