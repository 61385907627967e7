"""Rounding to the nearest code."""

import pytest
import torch

from worker_svc.quantization import rounding
from worker_svc.quantization.codes import dequantize
from worker_svc.quantization.rounding import quantize
from worker_svc.quantization.scheme import Scheme


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(4, None), Scheme(8, None), Scheme(8, 64)])
def test_errors_are_bounded(scheme: Scheme, clip: bool) -> None:
    """Without clipping, no weight moves by more than half a step; clipping has the smaller squared error."""
    torch.manual_seed(0)
    weight = torch.randn(16, 128).bfloat16()
    weight[3] = 0
    codes, scales = quantize(weight, scheme, clip=clip)
    assert scales.dtype == torch.bfloat16
    found = dequantize(codes, scales, scheme.bits)
    error = (found - weight.float()).abs().view(16, scales.shape[1], -1)
    plain = dequantize(*quantize(weight, scheme, clip=False), scheme.bits) - weight.float()
    assert error.square().sum() <= plain.square().sum()
    if clip:
        assert scheme.bits == 8 or error.square().sum() < 0.98 * plain.square().sum()
    else:
        # The scale is rounded to bfloat16, so the largest code may be clipped a little.
        assert bool((error <= 0.51 * scales.float().unsqueeze(-1) + 2**-8 * weight.abs().max()).all())


def test_weights_on_the_grid_stay() -> None:
    """Weights that are codes times a scale come back unchanged."""
    values = torch.arange(-8, 8).repeat(2).float()[None]
    codes, scales = quantize(values * 0.25, Scheme(4, None), clip=True)
    torch.testing.assert_close(dequantize(codes, scales, 4), values * 0.25, rtol=0.1, atol=0.13)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(8, None)])
def test_groups_of_zeros_stay_zero(scheme: Scheme, dtype: torch.dtype, clip: bool) -> None:
    """Also in types that cannot hold the smallest scale, and beside weights that are nearly zero."""
    weight = torch.zeros(3, 64, dtype=dtype)
    weight[1, 5] = torch.finfo(dtype).tiny
    codes, scales = quantize(weight, scheme, clip=clip)
    assert bool(scales.isfinite().all())
    assert bool((scales > 0).all())
    found = dequantize(codes, scales, scheme.bits)
    assert float(found.abs().max()) <= 2 * torch.finfo(dtype).tiny


def test_rows_are_rounded_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that are rounded at a time change nothing."""
    torch.manual_seed(0)
    weight = torch.randn(10, 64).bfloat16()
    whole = quantize(weight, Scheme(4, 32), clip=True)
    monkeypatch.setattr(rounding, "_ROWS", 3)
    assert all(map(torch.equal, quantize(weight, Scheme(4, 32), clip=True), whole))
