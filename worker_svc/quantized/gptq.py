"""Quantizes a matrix so that the errors of its weights cancel on calibration data.

The algorithm is GPTQ (Frantar et al., 2022, arXiv:2210.17323). Inputs are rounded in turn, and later inputs
make up for the error of each. Scales are chosen first, from the original weights, so rounding can begin with
the most important inputs without reordering groups. Afterwards all scales of a row are fitted to its codes
together, and each code moves once more if the cost falls.
"""

from typing import Final

import torch

from worker_svc.quantized.codes import SHARES, ScaleSearch, Scheme

# Added to the Hessian's diagonal, as a share of its mean. A few thousand tokens give a rough Hessian, and
# with 0.03 GPTQ overfits it. 0.1 does as well as 0.3.
_DAMPING: Final = 0.3
# Least-squares fits of a scale to its codes, each followed by rounding.
_FITS: Final = 2
_TINY: Final = 1e-12
# Inputs per product that spreads errors to later inputs.
_BLOCK: Final = 64
# Outputs per search for scales.
_ROWS: Final = 2048
# Pairs of groups per fit of scales, over all its outputs: 256 MiB in float64.
_PAIRS: Final = 2**25


def quantize_with(
    weight: torch.Tensor, hessian: torch.Tensor, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Quantizes a matrix, in about 20 bytes for each pair of inputs and 30 bytes for each weight.

    A scale may be negative: codes reach a step further below 0 than above, and the sign turns that side to
    the group's largest weights.

    Args:
        weight: [outputs, inputs]; groups divide the inputs.
        hessian: cost of a pair of errors in the same row, in any unit; float32 [inputs, inputs], symmetric.
        scheme: of the result.

    Returns:
        Codes, uint8 [outputs, inputs], and scales, in the weight's type [outputs, groups]; or `None` if the
        Hessian is zero or not finite.
    """
    mean = hessian.diagonal().double().mean()
    if not bool(hessian.isfinite().all()) or mean <= 0:
        return None
    hessian = hessian / mean.float()
    hessian.diagonal().add_(_DAMPING)
    inputs, groups = weight.shape[1], scheme.groups(weight.shape[1])
    importance = hessian.diagonal().view(groups, -1)
    scales = torch.cat([_scales(rows, importance, scheme) for rows in weight.split(_ROWS)])
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    half = 2 ** (scheme.bits - 1)
    exact = weight.float().t().contiguous()
    codes = torch.empty_like(exact)
    codes[order] = _rounded(
        exact[order], _spread(scales, inputs)[order], _inverse_factor(hessian, order), half
    )
    rows = max(1, _PAIRS // groups**2)
    parts = zip(exact.split(rows, dim=1), codes.split(rows, dim=1), scales.split(rows), strict=True)
    scales = torch.cat([_fitted(*part, hessian) for part in parts])
    codes = _settled(exact, codes, _spread(scales, inputs), hessian, half)
    return (codes.t() + half).to(torch.uint8).contiguous(), scales


def _inverse_factor(hessian: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Returns the upper Cholesky factor of the inverse, float32 [inputs, inputs], of inputs in this order.

    Row i is the change of inputs from i on per unit of input i's error, with earlier inputs settled.
    """
    # Each step's float64 matrix, the largest of calibration, replaces the last.
    matrix: torch.Tensor = hessian[order[:, None], order].double()
    matrix = torch.linalg.cholesky(matrix)
    matrix = torch.cholesky_inverse(matrix)
    matrix = torch.linalg.cholesky(matrix, upper=True)
    return matrix.float()


def _scales(weight: torch.Tensor, importance: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Returns the scales with the least error, weighted by importance, [outputs, groups]; none is zero."""
    search = ScaleSearch(weight, scheme, importance)
    for share in SHARES:
        search.attempt(search.widest * share)
        search.attempt(search.widest * -share)
    for _ in range(_FITS):
        weighted = search.codes * importance
        fitted = (weighted * search.grouped).sum(dim=-1, keepdim=True)
        search.attempt(fitted / (weighted * search.codes).sum(dim=-1, keepdim=True).clamp_(min=_TINY))
    return search.scales.squeeze(-1).to(weight.dtype)


def _rounded(weight: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor, half: int) -> torch.Tensor:
    """Returns codes around 0, float32 [inputs, outputs], in the order of rounding; overwrites `weight`."""
    codes = torch.empty_like(weight)
    for first in range(0, len(weight), _BLOCK):
        last = min(first + _BLOCK, len(weight))
        block, errors = weight[first:last], torch.empty_like(weight[first:last])
        ahead = factor[first:last, first:last]
        for i in range(last - first):
            scale = scales[first + i]
            code = torch.round(block[i] / scale).clamp_(-half, half - 1)
            codes[first + i] = code
            errors[i] = (block[i] - code * scale) / ahead[i, i]
            block[i + 1 :].addr_(ahead[i, i + 1 :], errors[i], alpha=-1)
        weight[last:].addmm_(factor[first:last, last:].t(), errors, alpha=-1)
    return codes


def _spread(scales: torch.Tensor, inputs: int) -> torch.Tensor:
    """Returns the scale of each weight, float32 [inputs, outputs], from scales [outputs, groups]."""
    return scales.float().t().repeat_interleave(inputs // scales.shape[1], dim=0)


def _fitted(
    weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, hessian: torch.Tensor
) -> torch.Tensor:
    """Returns scales with the least cost for these codes; none is zero.

    `scales` stay in rows in which rounding the new scales to their type would cost more. Weights and codes
    are float32 [inputs, outputs].
    """
    inputs, outputs = weight.shape
    groups = scales.shape[1]
    grouped = codes.view(groups, -1, outputs)
    products = torch.empty(outputs, groups, groups)
    for group, members in enumerate(hessian.split(inputs // groups, dim=1)):
        reached = (members @ grouped[group]).view(groups, -1, outputs)
        products[:, :, group] = (reached * grouped).sum(dim=1).t()
    wanted = ((hessian @ weight).view(groups, -1, outputs) * grouped).sum(dim=1).t()
    diagonal = products.diagonal(dim1=1, dim2=2)
    diagonal.add_(1e-6 * diagonal.mean(dim=1, keepdim=True) + _TINY)  # groups with codes of 0 alone
    found = torch.linalg.solve(products.double(), wanted.double().unsqueeze(-1)).squeeze(-1).to(scales.dtype)
    found = torch.where(found.isfinite() & (found != 0), found, scales)

    def cost(tried: torch.Tensor) -> torch.Tensor:
        error = codes * _spread(tried, inputs) - weight
        return ((hessian @ error) * error).sum(dim=0)

    return torch.where((cost(found) < cost(scales))[:, None], found, scales)


def _settled(
    weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, hessian: torch.Tensor, half: int
) -> torch.Tensor:
    """Returns codes after another pass, in which each input gets the code that fits all others best.

    All but the Hessian are float32 [inputs, outputs].
    """
    settled, slopes = codes.clone(), hessian @ (codes * scales - weight)
    for first in range(0, len(weight), _BLOCK):
        last = min(first + _BLOCK, len(weight))
        moved = torch.empty_like(weight[first:last])
        for i in range(first, last):
            best = torch.round(settled[i] - slopes[i] / (hessian[i, i] * scales[i])).clamp_(-half, half - 1)
            moved[i - first] = (best - settled[i]) * scales[i]
            settled[i] = best
            slopes[first:last].addr_(hessian[first:last, i], moved[i - first])
        slopes[last:].addmm_(hessian[last:, first:last], moved)
    return settled
