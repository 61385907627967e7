"""Rounding to the nearest code."""

import pytest
import torch

from worker_svc.quantized.codes import Scheme, dequantize, quantize

ROWS = 2050


@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(4, None), Scheme(8, None), Scheme(8, 64)])
def test_errors_are_less_than_without_clipping(scheme: Scheme) -> None:
    torch.manual_seed(0)
    weight = torch.randn(ROWS, 128).bfloat16()
    weight[3] = 0
    codes, scales = quantize(weight, scheme)
    assert scales.dtype == torch.bfloat16
    error = dequantize(codes, scales, scheme.bits) - weight.float()
    half = 2 ** (scheme.bits - 1)
    grouped = weight.float().view(ROWS, scales.shape[1], -1)
    steps = grouped.abs().amax(-1, keepdim=True).clamp(min=1e-9) / (half - 0.5)
    plain = (grouped / steps).round().clamp(-half, half - 1) * steps - grouped
    assert error.square().sum() < (0.98 if scheme.bits == 4 else 1) * plain.square().sum()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(8, None)])
def test_groups_of_zeros_stay_zero(scheme: Scheme, dtype: torch.dtype) -> None:
    """Also in types that cannot hold the smallest scale, and beside weights that are nearly zero."""
    weight = torch.zeros(3, 64, dtype=dtype)
    weight[1, 5] = torch.finfo(dtype).tiny
    codes, scales = quantize(weight, scheme)
    assert bool(scales.isfinite().all())
    assert bool((scales > 0).all())
    found = dequantize(codes, scales, scheme.bits)
    assert float(found.abs().max()) <= 2 * torch.finfo(dtype).tiny
