"""Our kernels as PyTorch operators, `triptych_cpu::*`, so that models call them and graphs record them.

An operator runs a program of a single kernel. `lower` gives a graph this program, on the addresses of its
tensors. Operators take the arguments of `program.Kernels` and allocate their results.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from protos.service.logs import get_logger
from worker_svc.devices.cpu.kernels.build import KernelsUnavailable, has_matrix_units, library
from worker_svc.devices.cpu.kernels.program import Kernels, Program

Result = torch.Tensor | None

_aten: Any = torch.ops.aten
# Types of sums that have a program.
_SUMMED = (torch.float32, torch.bfloat16)


@functools.cache
def kernels() -> Kernels | None:
    """Returns the kernels; `None`, with a line in the log, if they are unavailable."""
    try:
        return Kernels(library())
    except (KernelsUnavailable, OSError) as error:
        get_logger().info("cpu_kernels_from_wheel", reason=str(error))
        return None


def product_kernels(dtype: torch.dtype) -> Kernels | None:
    """Returns the kernels for products of unquantized weights and for paged attention in a type.

    `None` if unavailable, or if the wheel's are faster thanks to matrix units for the type. The attending
    kernels define the cache's layout, so they must also write it.
    """
    return None if dtype == torch.bfloat16 and has_matrix_units() else kernels()


def _loaded() -> Kernels:
    loaded = kernels()
    assert loaded is not None  # models call an operator only after kernels() returned something
    return loaded


def _empty_product(x: torch.Tensor, packed: torch.Tensor, bias: Result, columns: int, wide: bool) -> Result:
    del packed, bias
    return x.new_empty((x.shape[0], columns), dtype=torch.float32 if wide else x.dtype)


def _empty_quantized(
    x: torch.Tensor, packed: torch.Tensor, factor: float, bits: int, bias: Result, columns: int, wide: bool
) -> Result:
    del factor, bits
    return _empty_product(x, packed, bias, columns, wide)


def _empty_like_x(x: torch.Tensor, *_: Any) -> Result:
    return x.new_empty(x.shape)


def _empty_half(x: torch.Tensor, activation: str) -> Result:
    del activation
    return x.new_empty((x.shape[0], x.shape[1] // 2))


def _empty_columns(x: torch.Tensor, packed: torch.Tensor, slots: torch.Tensor, columns: int) -> Result:
    del packed, slots
    return x.new_empty((x.shape[0], columns))


def _no_result(*_: Any) -> Result:
    return None


_PROGRAMS: dict[Any, Callable[..., Program]] = {}
"""By operator, the function that builds a program from a call's result and arguments."""


def _define(
    name: str, schema: str, program: Callable[..., Program], result_of: Callable[..., Result]
) -> None:
    def run(*args: Any) -> Result:
        result = result_of(*args)
        program(result, *args)()
        return result

    torch.library.define(f"triptych_cpu::{name}", schema)
    torch.library.impl(f"triptych_cpu::{name}", "CPU", run)
    torch.library.register_fake(f"triptych_cpu::{name}", result_of)
    _PROGRAMS[getattr(torch.ops.triptych_cpu, name).default] = program


_define(
    "linear",
    "(Tensor x, Tensor packed, Tensor? bias, int columns, bool wide) -> Tensor",
    lambda out, x, packed, bias, *_: _loaded().linear(x, packed, bias, out),
    _empty_product,
)
_define(
    "quantized_linear",
    "(Tensor x, Tensor packed, float factor, int bits, Tensor? bias, int columns, bool wide) -> Tensor",
    lambda out, x, packed, factor, bits, bias, *_: _loaded().quantized(x, packed, factor, bits, bias, out),
    _empty_quantized,
)
_define(
    "rms_norm",
    "(Tensor x, Tensor weight, float epsilon) -> Tensor",
    lambda out, x, weight, epsilon: _loaded().norm(x, weight, epsilon, out),
    _empty_like_x,
)
_define(
    "add_rms_norm_",
    "(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float epsilon) -> ()",
    lambda _, *args: _loaded().add_norm(*args),
    _no_result,
)
_define(
    "layer_norm",
    "(Tensor x, Tensor weight, Tensor? bias, float epsilon) -> Tensor",
    lambda out, x, weight, bias, epsilon: _loaded().layer_norm(x, weight, bias, epsilon, out),
    _empty_like_x,
)
_define("gelu", "(Tensor x) -> Tensor", lambda out, x: _loaded().gelu(x, out), _empty_like_x)
_define(
    "gate",
    "(Tensor x, str activation) -> Tensor",
    lambda out, x, activation: _loaded().gate(x, activation, out),
    _empty_half,
)
_define(
    "rotate_",
    "(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor cos_sin) -> ()",
    lambda _, *args: _loaded().rotate(*args),
    _no_result,
)
_define(
    "lora_shrink",
    "(Tensor x, Tensor packed, Tensor slots, int columns) -> Tensor",
    lambda out, x, packed, slots, _: _loaded().shrink(x, packed, slots, out),
    _empty_columns,
)
_define(
    "lora_expand_",
    "(Tensor(a!) out, Tensor shrunk, Tensor packed, Tensor slots, int[] sizes) -> ()",
    lambda _, *args: _loaded().expand(*args),
    _no_result,
)


def lower(op: Any, args: Sequence[Any], result: Any) -> Program | None:
    """Returns the program for a call of an operator; `None` without a program.

    Includes two of PyTorch's operators that would divide a program: copies, and sums in float32 and
    bfloat16, whose bits are the same.
    """
    if (program := _PROGRAMS.get(op)) is not None:
        return program(result, *args)
    if op not in (_aten.add.Tensor, _aten.clone.default) or kernels() is None or not _is_plain(args, result):
        return None
    if op is _aten.clone.default:
        return _loaded().copy(args[0], result)
    return _loaded().add(args[0], args[1], result) if result.dtype in _SUMMED else None


def _is_plain(args: Sequence[Any], result: torch.Tensor) -> bool:
    """Whether all arguments are tensors of the result's type and shape, and contiguous."""
    return all(
        isinstance(each, torch.Tensor)
        and each.dtype == result.dtype
        and each.shape == result.shape
        and each.is_contiguous()
        for each in (*args, result)
    )
