"""Compiled layers for CPUs: our own kernels where they apply, else those of vLLM's wheel.

They are registered with vLLM's extension points: providers of IR operators, out-of-tree custom ops, and the
two functions through which its layers call compiled kernels.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch.nn import functional
from vllm import _custom_ops as vllm_ops
from vllm import ir
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.activation import GELU, GeluAndMul, SiluAndMul

from worker_svc.devices.cpu.kernels.ops import kernels, product_kernels
from worker_svc.devices.quantized import activation_rows

# vLLM's and our namespaces of compiled kernels.
_ops: Any = torch.ops._C  # noqa: SLF001 - not private: an operator namespace of that name
_own: Any = torch.ops.triptych_cpu

_MATRIX = 2
# Types of activations for which encoders have layers of ours.
_ENCODER_TYPES = (torch.float32, torch.bfloat16)


def _use_own(*tensors: torch.Tensor, dtypes: Collection[torch.dtype] = (torch.bfloat16,)) -> bool:
    """Whether our own kernels are available and serve these activations."""
    return kernels() is not None and all(
        tensor.dtype in dtypes and tensor.dim() and tensor.stride(-1) == 1 for tensor in tensors
    )


def _supports_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    del epsilon
    if variance_size is not None or weight is None or weight.dtype not in (x.dtype, torch.float32):
        return False
    return x.is_contiguous() or (_use_own(x) and x.dim() in (2, 3))


def _supports_add_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return (
        _supports_norm(x, weight, epsilon, variance_size) and x.is_contiguous() and x_residual.is_contiguous()
    )


@ir.ops.rms_norm.register_impl("triptych_cpu", supports_args=_supports_norm)
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    """Normalizes over the last dimension in a single pass.

    With float32 weights it computes in float32, as Gemma does.
    """
    del variance_size
    assert weight is not None
    if _use_own(x) and x.dim() in (2, 3):
        normalized: torch.Tensor = _own.rms_norm(x, weight, epsilon)
        return normalized
    wide = x.to(weight.dtype)
    output = torch.empty_like(wide)
    _ops.rms_norm(output, wide, weight, epsilon)
    return output.to(x.dtype)


@ir.ops.fused_add_rms_norm.register_impl("triptych_cpu", supports_args=_supports_add_norm, inplace=True)
def fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds the residual and normalizes. If the types are equal, both results overwrite their inputs."""
    del variance_size
    assert weight is not None
    if _use_own(x, x_residual) and x.dim() == _MATRIX:
        _own.add_rms_norm_(x, x_residual, weight, epsilon)
        return x, x_residual
    if weight.dtype == x.dtype:
        _ops.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual
    # Normalize the sum before rounding it.
    wide = x.to(weight.dtype).add_(x_residual)
    normalized = torch.empty_like(wide)
    _ops.rms_norm(normalized, wide, weight, epsilon)
    return x.copy_(normalized), x_residual.copy_(wide)


@SiluAndMul.register_oot
class CpuSiluAndMul(SiluAndMul):
    """`silu(x[:d]) * x[d:]`. The fallback is PyTorch's vectorized operators; vLLM's kernel is slower."""

    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [tokens, 2 * d] to [tokens, d]."""
        if _use_own(x) and x.dim() == _MATRIX:
            gated: torch.Tensor = _own.gate(x, "silu")
            return gated
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)


@GeluAndMul.register_oot
class CpuGeluAndMul(GeluAndMul):
    """`gelu(x[:d]) * x[d:]`."""

    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [tokens, 2 * d] to [tokens, d]."""
        if self.approximate == "tanh" and _use_own(x) and x.dim() == _MATRIX:
            gated: torch.Tensor = _own.gate(x, "gelu_tanh")
            return gated
        plain: torch.Tensor = self.forward_native(x)
        return plain


@GELU.register_oot
class CpuGelu(GELU):
    """GELU by the error function."""

    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        """Maps a tensor of any shape."""
        if _use_own(x, dtypes=_ENCODER_TYPES) and x.is_contiguous():
            own: torch.Tensor = _own.gelu(x)
            return own
        plain: torch.Tensor = super().forward_cpu(x)
        return plain


class CpuLayerNorm(torch.nn.LayerNorm):
    """The layer norm of encoders."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalizes [tokens, size] over the last dimension."""
        own = _use_own(x, dtypes=_ENCODER_TYPES) and x.dim() == _MATRIX and x.is_contiguous()
        if own and self.elementwise_affine and self.weight.dtype == x.dtype and self.weight.dim() == 1:
            normalized: torch.Tensor = _own.layer_norm(x, self.weight, self.bias, self.eps)
            return normalized
        return super().forward(x)


def use_own_layer_norms(model: torch.nn.Module) -> None:
    """Gives a model's layer norms our kernel. Encoders use PyTorch's layer, which vLLM's registry lacks."""
    for module in model.modules():
        if type(module) is torch.nn.LayerNorm:
            module.__class__ = CpuLayerNorm


_rotary_embedding = vllm_ops.rotary_embedding


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    *rest: Any,
    **named: Any,
) -> None:
    """Applies rotary positions to queries and keys in place.

    All of vLLM's rotary layers call this function.
    """
    rotated = (query,) if key is None else (query, key)
    if (
        is_neox
        and not rest
        and not named
        and positions.dim() == 1
        and _use_own(cos_sin_cache, *rotated)
        and query.dim() == _MATRIX
    ):
        _own.rotate_(positions, query, key, head_size, cos_sin_cache)
    else:
        # The kernel takes three dimensions for a batch of sequences, so heads must not have their own.
        flat = [states.flatten(1) if positions.dim() == 1 else states for states in rotated]
        joined = flat[1] if key is not None else None
        _rotary_embedding(positions, flat[0], joined, head_size, cos_sin_cache, is_neox, *rest, **named)
        for states, result in zip(rotated, flat, strict=True):
            if not states.is_contiguous():  # otherwise both are the same memory
                states.copy_(result.view(states.shape))


vllm_ops.rotary_embedding = rotary_embedding

_dispatch_gemm = layer_utils.dispatch_cpu_unquantized_gemm


def dispatch_gemm(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Packs a layer's weights for our product. vLLM calls it for every unquantized layer with loaded weights.

    Args:
        layer: gets `cpu_linear`, which its forward calls.
        remove_weight: whether the layer has no other use for its weights. False for an embedding, which may
            also be the output head. Its weights are packed on the first product, and its results are logits,
            which stay in float32.
    """
    weight: Any = layer.weight
    if not (
        product_kernels(weight.dtype) is not None
        and weight.dim() == _MATRIX
        and (weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0))
        and not weight.is_meta
        and not getattr(layer, "_cpu_skip_gemm_dispatch", False)
    ):
        _dispatch_gemm(layer, remove_weight)
        return
    linear: Any = _PackedLinear(weight.data.contiguous(), wide=not remove_weight)
    layer.cpu_linear = linear
    if remove_weight:
        linear.pack()
        layer.weight = torch.nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)


layer_utils.dispatch_cpu_unquantized_gemm = dispatch_gemm


class _PackedLinear:
    """A layer's `cpu_linear`, which packs its weights at the latest on the first call."""

    def __init__(self, weight: torch.Tensor, *, wide: bool) -> None:
        self._weight: torch.Tensor | None = weight
        self._packed = weight
        self._columns = weight.shape[0]
        self._wide = wide

    def pack(self) -> None:
        """Packs the weights if they are not packed yet."""
        loaded = kernels()
        if self._weight is not None and loaded is not None:
            self._packed = loaded.pack(self._weight)
            self._weight = None

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        del weight
        self.pack()
        rows = activation_rows(x, self._packed.dtype)
        product: torch.Tensor = _own.linear(rows, self._packed, bias, self._columns, self._wide)
        return product.view(*x.shape[:-1], self._columns)
