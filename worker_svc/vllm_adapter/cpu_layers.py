"""Compiled forms of layers for which vLLM's CPU platform takes plain PyTorch, each several small operators long.

Registered through the two doors that vLLM leaves open: providers of IR operators and out-of-tree custom ops.
"""

from typing import Any

import torch
from torch.nn import functional
from vllm import ir
from vllm.model_executor.layers.activation import SiluAndMul

# The namespace under which vLLM registers its compiled kernels.
_ops: Any = torch.ops._C  # noqa: SLF001 - not private: an operator namespace of that name


def _served(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    del epsilon
    if variance_size is not None or weight is None or not x.is_contiguous():
        return False
    return weight.dtype in (x.dtype, torch.float32)


def _served_add(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return _served(x, weight, epsilon, variance_size) and x_residual.is_contiguous()


@ir.ops.rms_norm.register_impl("triptych_cpu", supports_args=_served)
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    """Normalizes over the last dimension, in one pass. Weights in float32 mean that all of it is, as in Gemma."""
    del variance_size
    assert weight is not None
    wide = x.to(weight.dtype)
    output = torch.empty_like(wide)
    _ops.rms_norm(output, wide, weight, epsilon)
    return output.to(x.dtype)


@ir.ops.fused_add_rms_norm.register_impl("triptych_cpu", supports_args=_served_add, inplace=True)
def fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds the residual and normalizes; where types are the same, both results take their inputs' place."""
    del variance_size
    assert weight is not None
    if weight.dtype == x.dtype:
        _ops.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual
    # The sum is normalized before it is rounded.
    wide = x.to(weight.dtype).add_(x_residual)
    normalized = torch.empty_like(wide)
    _ops.rms_norm(normalized, wide, weight, epsilon)
    return x.copy_(normalized), x_residual.copy_(wide)


@SiluAndMul.register_oot
class CpuSiluAndMul(SiluAndMul):
    """``silu(x[:d]) * x[d:]`` with PyTorch's vectorized operators: a quarter of the time of vLLM's kernel, which is not."""

    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [tokens, 2 * d] to [tokens, d]."""
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)
