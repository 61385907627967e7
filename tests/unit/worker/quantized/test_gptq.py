"""Matrices that are quantized with a Hessian."""

import pytest
import torch

from worker_svc.quantized.codes import Scheme, dequantize, quantize
from worker_svc.quantized.gptq import quantize_with

SCHEMES = (Scheme(4, 32), Scheme(4, None), Scheme(8, 64))


def _case(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a matrix and the Hessian of inputs of which some are alike and some are large."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(24, 128, generator=generator).bfloat16()
    x = torch.randn(400, 128, generator=generator) @ torch.randn(128, 128, generator=generator)
    x *= torch.rand(128, generator=generator) * 3
    return weight, x.t() @ x


def _cost(
    weight: torch.Tensor, made: tuple[torch.Tensor, torch.Tensor], hessian: torch.Tensor, bits: int
) -> float:
    error = dequantize(*made, bits) - weight.float()
    return float(((error @ hessian) * error).sum())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_cost_is_less_than_that_of_rounding(scheme: Scheme) -> None:
    """By the Hessian, errors cost much less than those of rounding with the best scales."""
    weight, hessian = _case()
    made = quantize_with(weight, hessian, scheme)
    assert made is not None
    rounded = quantize(weight, scheme)
    assert _cost(weight, made, hessian, scheme.bits) < 0.6 * _cost(weight, rounded, hessian, scheme.bits)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_result_is_like_that_of_rounding(scheme: Scheme) -> None:
    """Groups keep their place: weights stay near, although the largest inputs are rounded first."""
    weight, hessian = _case()
    made = quantize_with(weight, hessian, scheme)
    assert made is not None
    codes, scales = made
    assert codes.dtype == torch.uint8
    assert codes.shape == weight.shape
    assert int(codes.max()) < 2**scheme.bits
    assert scales.dtype == weight.dtype
    assert scales.shape == (24, scheme.groups(128))
    widest = weight.float().view(24, scales.shape[1], -1).abs().amax(-1) / (2 ** (scheme.bits - 1) - 0.5)
    # From half the scale that just holds the largest weight, to that one; fits may move it a little.
    assert bool((scales.float().abs() < 1.2 * widest).all())
    assert bool((scales.float().abs() > 0.4 * widest).all())
    again = quantize_with(weight, hessian, scheme)
    assert again is not None
    assert all(map(torch.equal, made, again))
    error = dequantize(codes, scales, scheme.bits) - weight.float()
    assert error.norm() < (0.25 if scheme.bits == 4 else 0.02) * weight.float().norm()


def test_independent_inputs_are_rounded_to_the_nearest_code() -> None:
    """If errors of inputs do not meet, no weight makes up for another."""
    weight, _ = _case()
    made = quantize_with(weight, torch.diag(torch.rand(128)), Scheme(4, 32))
    assert made is not None
    codes, scales = made
    steps = scales.float().repeat_interleave(32, dim=1)
    assert torch.equal(codes.float() - 8, torch.round(weight.float() / steps).clamp(-8, 7))


def test_the_long_side_of_the_codes_is_where_the_largest_weight_is() -> None:
    """Codes reach from -8 to 7, so a group whose largest weight is positive gets a negative scale."""
    weight = torch.linspace(-1, 1, 32)[None].repeat(2, 1)
    weight[0, -1], weight[1, 0] = 8 / 7, -8 / 7
    made = quantize_with(weight, torch.eye(32), Scheme(4, 32))
    assert made is not None
    assert torch.sign(made[1]).flatten().tolist() == [-1, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_groups_of_zeros_stay_zero(dtype: torch.dtype) -> None:
    """Their scales are finite and not zero, in types that cannot hold the smallest scale, too."""
    _, hessian = _case()
    weight = torch.zeros(3, 128, dtype=dtype)
    made = quantize_with(weight, hessian, Scheme(4, 32))
    assert made is not None
    assert bool((made[1].isfinite() & (made[1] != 0)).all())
    assert float(dequantize(*made, 4).abs().max()) == 0


@pytest.mark.parametrize("hessian", [torch.zeros(128, 128), torch.full((128, 128), torch.nan)])
def test_a_hessian_that_says_nothing(hessian: torch.Tensor) -> None:
    """A matrix that no gradient reached, or an infinite one, is not calibrated."""
    assert quantize_with(_case()[0], hessian, Scheme(4, 32)) is None


def test_inputs_that_are_never_used() -> None:
    """Inputs that were always zero do not keep the others from being calibrated."""
    weight, hessian = _case()
    hessian[:40], hessian[:, :40] = 0, 0
    made = quantize_with(weight, hessian, Scheme(4, 32))
    assert made is not None
    assert _cost(weight, made, hessian, 4) < 0.6 * _cost(weight, quantize(weight, Scheme(4, 32)), hessian, 4)
