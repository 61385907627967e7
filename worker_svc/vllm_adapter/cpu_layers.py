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


def _same_dtype(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    del epsilon
    return variance_size is None and weight is not None and weight.dtype == x.dtype and x.is_contiguous()


def _same_dtype_add(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return _same_dtype(x, weight, epsilon, variance_size) and x_residual.is_contiguous()


@ir.ops.rms_norm.register_impl("triptych_cpu", supports_args=_same_dtype)
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    """Normalizes over the last dimension, in one pass."""
    del variance_size
    output = torch.empty_like(x)
    _ops.rms_norm(output, x, weight, epsilon)
    return output


@ir.ops.fused_add_rms_norm.register_impl("triptych_cpu", supports_args=_same_dtype_add, inplace=True)
def fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds the residual and normalizes; both results take their inputs' place."""
    del variance_size
    _ops.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


@SiluAndMul.register_oot
class CpuSiluAndMul(SiluAndMul):
    """``silu(x[:d]) * x[d:]`` with PyTorch's vectorized operators: a quarter of the time of vLLM's kernel, which is not."""

    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [tokens, 2 * d] to [tokens, d]."""
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)
