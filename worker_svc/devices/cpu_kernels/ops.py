"""Our kernels as operators of PyTorch, ``triptych_cpu::*``, so that models call them and graphs record them.

An operator runs a program of one kernel; :func:`lower` gives a graph that program, on the addresses that the graph has for its tensors.
All of them are for bfloat16. Arguments are those of ``program.Kernels``; results are made here.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from protos.logs import get_logger
from worker_svc.devices.cpu_kernels.build import NoKernels, library
from worker_svc.devices.cpu_kernels.program import Kernels, Program

Result = torch.Tensor | None


@functools.cache
def kernels() -> Kernels | None:
    """The kernels, or ``None``, with a line in the log, where they cannot be had."""
    try:
        return Kernels(library())
    except (NoKernels, OSError) as error:
        get_logger().info("cpu_kernels_of_the_wheel", reason=str(error))
        return None


def _loaded() -> Kernels:
    loaded = kernels()
    assert loaded is not None  # whoever calls an operator has asked
    return loaded


def _linear(out: Any, x: torch.Tensor, packed: torch.Tensor, bias: Result, *_: Any) -> Program:
    return _loaded().linear(x, packed, bias, out)


def _like_product(x: torch.Tensor, packed: torch.Tensor, bias: Result, columns: int, wide: bool) -> Result:
    del packed, bias
    return x.new_empty((x.shape[0], columns), dtype=torch.float32 if wide else x.dtype)


def _rms_norm(out: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> Program:
    return _loaded().norm(x, weight, epsilon, out)


def _like_x(x: torch.Tensor, *_: Any) -> Result:
    return x.new_empty(x.shape)


def _add_rms_norm(_: Any, *args: Any) -> Program:
    return _loaded().add_norm(*args)


def _gate(out: Any, x: torch.Tensor, how: str) -> Program:
    return _loaded().gate(x, how, out)


def _like_half(x: torch.Tensor, how: str) -> Result:
    del how
    return x.new_empty((x.shape[0], x.shape[1] // 2))


def _rotate(_: Any, *args: Any) -> Program:
    return _loaded().rotate(*args)


def _in_place(*_: Any) -> Result:
    return None


_PROGRAMS: dict[Any, Callable[..., Program]] = {}
"""What makes a program of a call's result and its arguments, by operator."""


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
    _linear,
    _like_product,
)
_define("rms_norm", "(Tensor x, Tensor weight, float epsilon) -> Tensor", _rms_norm, _like_x)
_define(
    "add_rms_norm_",
    "(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float epsilon) -> ()",
    _add_rms_norm,
    _in_place,
)
_define("gate", "(Tensor x, str how) -> Tensor", _gate, _like_half)
_define(
    "rotate_",
    "(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor turns) -> ()",
    _rotate,
    _in_place,
)


def lower(op: Any, args: Sequence[Any], result: Any) -> Program | None:
    """The program of one call of an operator, or ``None`` if it is not ours."""
    program = _PROGRAMS.get(op)
    return None if program is None else program(result, *args)
