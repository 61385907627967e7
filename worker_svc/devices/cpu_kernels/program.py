"""Programs: lists of kernels on fixed addresses, run in one call by all threads together. The structures are those of ``program.h``."""

import ctypes
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from worker_svc.devices.base import AttentionInput, AttentionShape

_LINEAR, _NORM, _ADD_NORM, _GATE, _ROTATE, _WRITE_CACHE, _ATTEND = range(7)
GATES: Final = ("silu", "gelu_tanh")
PANEL: Final = 32
"""Columns that packed weights come in, and keys in a cache."""
MOST_HEAD: Final = 256
"""Values of a head that attention has room for."""
_MOST_GROUP: Final = 48
_LINE: Final = 64
# Which of a product's addresses is that of the next product's weights.
_NEXT: Final = 4


class _Op(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int64),
        ("plan", ctypes.c_int64),
        ("at", ctypes.c_void_p * 6),
        ("n", ctypes.c_int64 * 10),
        ("f", ctypes.c_double * 2),
    )


class _Plan(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("seq_lens", "query_start", "block_table", "slot_mapping")),
        *(
            (name, ctypes.c_int64)
            for name in ("width", "rows", "num_tokens", "total", "block_size", "longest_query", "longest")
        ),
    )


@functools.cache
def _library(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.triptych_run.argtypes = (pointer, number, pointer, pointer, ctypes.c_int)
    library.triptych_pack.argtypes = (pointer, pointer, number, number, ctypes.c_int)
    library.triptych_prepare.argtypes = (pointer,)
    library.triptych_progress_bytes.argtypes = (number,)
    library.triptych_progress_bytes.restype = number
    return library


class Kernels:
    """The compiled kernels, in this process."""

    def __init__(self, path: Path) -> None:
        """Loads them.

        Raises:
            OSError: if they cannot be loaded, as without PyTorch's threads in the process.
        """
        self._library = _library(path)

    def pack(self, weights: torch.Tensor) -> torch.Tensor:
        """Weights [columns, k] in the order in which products read them.

        Args:
            weights: bfloat16, contiguous; ``k`` is even.

        Returns:
            [panels, k / 2, 32, 2]; columns beyond the last are 0.
        """
        columns, size = weights.shape
        panels = -(-columns // PANEL)
        packed = torch.empty((panels, size // 2, PANEL, 2), dtype=torch.bfloat16)
        self._library.triptych_pack(
            weights.data_ptr(), packed.data_ptr(), columns, size, torch.get_num_threads()
        )
        return packed

    def linear(
        self,
        x: torch.Tensor,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> "Program":
        """A product with packed weights.

        Args:
            x: [rows, k], bfloat16, values of a row next to one another.
            packed: by :meth:`pack`.
            bias: bfloat16 [columns].
            out: [rows, columns], contiguous, bfloat16 or float32.
        """
        rows, size = x.shape
        numbers = (rows, out.shape[-1], size, x.stride(0), int(out.dtype == torch.float32))
        return self._program(_LINEAR, (x, packed, bias, out), numbers)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> "Program":
        """RMS norm over the last dimension.

        Args:
            x: bfloat16 of two or three dimensions, the last one's values next to one another.
            weight: float32 or bfloat16 [size].
            epsilon: added to the mean square.
            out: as ``x``, contiguous.
        """
        wide = x if x.dim() == 3 else x[:, None]
        numbers = (*wide.shape, wide.stride(0), wide.stride(1), int(weight.dtype == torch.float32))
        return self._program(_NORM, (x, weight, out), numbers, (epsilon,))

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> "Program":
        """Adds ``x`` to the residual, and makes ``x`` the sum's RMS norm. Both are bfloat16 [rows, size], contiguous."""
        rows, size = x.shape
        numbers = (rows, 1, size, size, size, int(weight.dtype == torch.float32))
        return self._program(_ADD_NORM, (x, weight, residual), numbers, (epsilon,))

    def gate(self, x: torch.Tensor, how: str, out: torch.Tensor) -> "Program":
        """``how(x[:, :size]) * x[:, size:]``, ``how`` one of :data:`GATES`; ``out`` is contiguous."""
        rows, size = out.shape
        return self._program(_GATE, (x, out), (rows, size, x.stride(0), GATES.index(how)))

    def rotate(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None,
        head_size: int,
        turns: torch.Tensor,
    ) -> "Program":
        """Turns the two halves of the first values of each head, in place.

        Args:
            positions: int64 [tokens].
            query: bfloat16 [tokens, heads * head_size].
            key: the same of keys.
            head_size: values of a head.
            turns: bfloat16 [positions, rotated]: cosines, then sines.
        """
        other = query if key is None else key
        numbers = (
            positions.shape[0], query.shape[-1] // head_size, other.shape[-1] // head_size, head_size,
            turns.shape[-1], query.stride(0), other.stride(0),
        )  # fmt: skip
        return self._program(_ROTATE, (positions, query, key, turns), numbers)

    def attention(
        self,
        shape: AttentionShape,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: torch.Tensor,
        output: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> "Program":
        """See ``Device.attend``; takes the :class:`AttentionPlan` when it is run."""
        group = shape.num_heads // shape.num_kv_heads
        given = (key, value) if shape.writes and key is not None and value is not None else (None, None)
        strides = [0 if tensor is None else tensor.stride(0) for tensor in given]
        write = (shape.num_kv_heads, shape.head_size, *strides, output.stride(0))
        attend = (shape.num_kv_heads, group, shape.head_size, shape.window, query.stride(0))
        return Program.join([
            self._program(_WRITE_CACHE, (*given, cache, output), write, num_plans=1),
            self._program(
                _ATTEND, (query, cache, output, sinks), attend, (shape.scale, shape.softcap), num_plans=1
            ),
        ], num_plans=1)  # fmt: skip

    def plan(self, block_size: int, step: AttentionInput) -> "AttentionPlan":
        """What :meth:`attention` wants of a step."""
        return AttentionPlan(self._library, block_size, step)

    def _program(
        self,
        kind: int,
        at: Sequence[torch.Tensor | None],
        numbers: Sequence[int],
        factors: Sequence[float] = (),
        *,
        num_plans: int = 0,
    ) -> "Program":
        op = _Op(kind, 0)
        for index, tensor in enumerate(at):
            op.at[index] = None if tensor is None else tensor.data_ptr()
        for index, number in enumerate(numbers):
            op.n[index] = number
        for index, factor in enumerate(factors):
            op.f[index] = factor
        return Program(self._library, [op], [tensor for tensor in at if tensor is not None], num_plans)


def serves(num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, block_size: int) -> bool:
    """Whether :meth:`Kernels.attention` serves layers of that kind."""
    return (
        dtype == torch.bfloat16
        and block_size % PANEL == 0
        and head_size % PANEL == 0
        and head_size <= MOST_HEAD
        and num_heads // num_kv_heads <= _MOST_GROUP
    )


class AttentionPlan:
    """One step's attention for one KV group."""

    def __init__(self, library: ctypes.CDLL, block_size: int, step: AttentionInput) -> None:
        """Keeps the step's tensors, and where they are."""
        self._step = step
        self._plan = _Plan(
            step.seq_lens.data_ptr(), step.query_start.data_ptr(), step.block_table.data_ptr(),
            step.slot_mapping.data_ptr(), step.block_table.stride(0), step.seq_lens.shape[0], step.num_tokens,
            step.slot_mapping.shape[0], block_size,
        )  # fmt: skip
        self.address = ctypes.addressof(self._plan)
        library.triptych_prepare(self.address)


class Program:
    """Kernels, in order. Called with the plans that they want, one for each call of attention, it runs them."""

    def __init__(
        self, library: ctypes.CDLL, ops: Sequence[Any], kept: Iterable[torch.Tensor], num_plans: int
    ) -> None:
        """Lays out what a run needs."""
        self._native = library
        self._kept = tuple(kept)
        self._num_plans = num_plans
        self._plans = (ctypes.c_void_p * max(1, num_plans))()
        self._ops = (_Op * len(ops))(*ops)
        following = None
        for op in reversed(self._ops):
            if op.kind == _LINEAR:
                op.at[_NEXT] = following
                following = op.at[1]
        size = library.triptych_progress_bytes(len(ops)) + _LINE
        self._memory = ctypes.create_string_buffer(size)
        start = ctypes.addressof(self._memory)
        self._run = functools.partial(
            library.triptych_run, ctypes.addressof(self._ops), len(ops), ctypes.addressof(self._plans),
            -(-start // _LINE) * _LINE, torch.get_num_threads(),
        )  # fmt: skip

    @classmethod
    def join(cls, programs: "Sequence[Program]", num_plans: int | None = None) -> "Program":
        """One program that does what these do in turn.

        Args:
            programs: at least one.
            num_plans: of the whole, if they share plans; by default each has its own, in the same order.
        """
        ops: list[_Op] = []
        kept: list[torch.Tensor] = []
        plans = 0
        for program in programs:
            for op in program._ops:  # noqa: SLF001 - our own kind
                copy = _Op.from_buffer_copy(op)
                copy.plan += 0 if num_plans is not None else plans
                ops.append(copy)
            kept += program._kept  # noqa: SLF001
            plans += program._num_plans  # noqa: SLF001
        return cls(programs[0]._native, ops, kept, plans if num_plans is None else num_plans)  # noqa: SLF001

    def __call__(self, *plans: AttentionPlan) -> None:
        """Runs it."""
        for index, plan in enumerate(plans):
            self._plans[index] = plan.address
        self._run()
