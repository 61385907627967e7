"""A step's arguments for attention programs: the addresses of its lengths and places.

The structure mirrors `program.h`.
"""

import ctypes
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn import functional

from worker_svc.devices.attention import AttentionCall, AttentionParams, PackedPlan, PagedInput, RowsPlan
from worker_svc.devices.quantized import SCALE_BYTES


class _Plan(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("seq_lens", "query_start", "block_table", "slot_mapping")),
        *(
            (name, ctypes.c_int64)
            for name in ("width", "rows", "num_tokens", "total", "block_size", "longest_query", "longest")
        ),
    )


class AttentionPlan:
    """A step's attention for a KV group."""

    def __init__(self, library: ctypes.CDLL, block_size: int, step: PagedInput) -> None:
        """Stores the addresses of the step's tensors and keeps the tensors alive."""
        self._step = step
        self._plan = _Plan(
            step.seq_lens.data_ptr(), step.query_start.data_ptr(), step.block_table.data_ptr(),
            step.slot_mapping.data_ptr(), step.block_table.stride(0), step.seq_lens.shape[0], step.num_tokens,
            step.slot_mapping.shape[0], block_size,
        )  # fmt: skip
        self.address = ctypes.addressof(self._plan)
        library.triptych_prepare(self.address)


class TextsPlan:
    """A step's attention for layers without a cache: the places of its texts."""

    def __init__(self, lengths: torch.Tensor, row_len: int | None, params: AttentionParams) -> None:
        """Stores the places of the texts.

        Args:
            lengths: int64 [texts], their tokens; 0 for none.
            row_len: tokens of a row with a single text, padding included; `None` for consecutive texts.
            params: of the layers.
        """
        self._source = lengths, row_len, params
        count = lengths.shape[0]
        starts = lengths.cumsum(0) - lengths if row_len is None else row_len * torch.arange(count)
        self._at = lengths.to(torch.int32), starts.to(torch.int32)
        self._plan = _Plan(
            self._at[0].data_ptr(), self._at[1].data_ptr(), rows=count,
            num_tokens=int(lengths.sum()) if row_len is None else count * row_len,
        )  # fmt: skip
        self.address = ctypes.addressof(self._plan)

    @functools.cached_property
    def plain(self) -> PackedPlan | RowsPlan:
        """The plan of the layers that `Kernels.attention_of_texts` does not serve."""
        lengths, row_len, params = self._source
        return PackedPlan.of(lengths, params) if row_len is None else RowsPlan.of(lengths, row_len, params)


(
    _LINEAR, _NORM, _ADD_NORM, _GATE, _ROTATE, _WRITE_CACHE, _ATTEND, _SHRINK, _EXPAND, _QUANTIZED,
    _FLOAT_LINEAR, _LAYER_NORM, _ADD, _GELU, _ATTEND_TEXTS, _COPY,
) = range(16)  # fmt: skip
GATES: Final = ("silu", "gelu_tanh")
PANEL: Final = 32
"""Columns of a panel, the unit of packed weights and of cached keys."""
MAX_HEAD_SIZE: Final = 256
"""The largest head that the attention kernel serves."""
# The most query heads that may share a key head.
_MAX_GROUP: Final = 48
# Bytes of a cache line.
_LINE: Final = 64
# The index of the address of the next product's weights.
_NEXT: Final = 4
_PRODUCTS: Final = (_LINEAR, _QUANTIZED, _FLOAT_LINEAR)
# Scales are stored in float16, relative to a power of two near the largest. So those of a layer may differ by
# 2**28 without losing a bit.
_LARGEST_SCALE: Final = 2**14


class _Op(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int64),
        ("plan", ctypes.c_int64),
        ("beside", ctypes.c_int64),
        ("at", ctypes.c_void_p * 6),
        ("n", ctypes.c_int64 * 11),
        ("f", ctypes.c_double * 2),
    )


@functools.cache
def _library(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.triptych_run.argtypes = (pointer, number, pointer, pointer, ctypes.c_int)
    library.triptych_pack.argtypes = (pointer, pointer, number, number, ctypes.c_int)
    library.triptych_pack_codes.argtypes = (pointer, pointer, pointer, *(number,) * 4, ctypes.c_int)
    library.triptych_prepare.argtypes = (pointer,)
    library.triptych_progress_bytes.argtypes = (number,)
    library.triptych_progress_bytes.restype = number
    return library


class Kernels:
    """The compiled kernels, loaded into this process."""

    def __init__(self, path: Path) -> None:
        """Loads the library.

        Raises:
            OSError: if it cannot be loaded, for example because PyTorch's OpenMP runtime is not in the
                process.
        """
        self._library = _library(path)

    def pack(self, weights: torch.Tensor) -> torch.Tensor:
        """Packs weights [columns, k] in the order in which products read them.

        Args:
            weights: float32, or contiguous bfloat16 with an even `k`.

        Returns:
            float32 [panels, k, 32], or bfloat16 [panels, k / 2, 32, 2]; columns beyond the last are 0.
        """
        columns, size = weights.shape
        panels = -(-columns // PANEL)
        if weights.dtype == torch.float32:
            missing = panels * PANEL - columns
            whole = functional.pad(weights, (0, 0, 0, missing)) if missing else weights
            return whole.reshape(panels, PANEL, size).transpose(1, 2).contiguous()
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
        """Multiplies by packed weights.

        Args:
            x: bfloat16 or float32 [rows, k]; the values of a row are contiguous.
            packed: the result of `pack`.
            bias: [columns], like `x`.
            out: [rows, columns], contiguous, like `x` or float32.
        """
        rows, size = x.shape
        numbers = (rows, out.shape[-1], size, x.stride(0), int(out.dtype == torch.float32))
        kind = _FLOAT_LINEAR if x.dtype == torch.float32 else _LINEAR
        return self._program(kind, (x, packed, bias, out), numbers)

    def pack_codes(
        self, codes: torch.Tensor, scales: torch.Tensor, bits: int
    ) -> "tuple[torch.Tensor, float]":
        """Packs quantized weights in the order in which `quantized` reads them.

        Args:
            codes: uint8 [columns, k], contiguous; half of their range stands for 0.
            scales: [columns, groups]; groups are of equal size, a multiple of 4.
            bits: of a code, 4 or 8.

        Returns:
            uint8 [panels, groups, bytes of a group], and the factor that all scales are to be multiplied by.
        """
        columns, size = codes.shape
        groups = scales.shape[1]
        panels = -(-columns // PANEL)
        group = size // groups
        largest = float(scales.abs().max())
        factor = 2.0 ** math.floor(math.log2(largest / _LARGEST_SCALE)) if largest else 1.0
        halves = (scales.double() / factor).to(torch.float16).contiguous()
        packed = torch.empty((panels, groups, PANEL * (SCALE_BYTES + group * bits // 8)), dtype=torch.uint8)
        self._library.triptych_pack_codes(
            codes.data_ptr(), halves.data_ptr(), packed.data_ptr(), columns, size, group, bits,
            torch.get_num_threads(),
        )  # fmt: skip
        return packed, factor

    def quantized(
        self,
        x: torch.Tensor,
        packed: torch.Tensor,
        factor: float,
        bits: int,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> "Program":
        """Multiplies by quantized weights.

        Args:
            x: bfloat16 [rows, k]; the values of a row are contiguous.
            packed: the first result of `pack_codes`.
            factor: the second result of `pack_codes`.
            bits: of a code.
            bias: bfloat16 [columns].
            out: [rows, columns], contiguous, bfloat16 or float32.
        """
        rows, size = x.shape
        wide = int(out.dtype == torch.float32)
        numbers = (rows, out.shape[-1], size, x.stride(0), wide, size // packed.shape[1], bits)
        return self._program(_QUANTIZED, (x, packed, bias, out), numbers, (factor,))

    def norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> "Program":
        """Computes the RMS norm over the last dimension.

        Args:
            x: bfloat16 of two or three dimensions; the last dimension is contiguous.
            weight: float32 or bfloat16 [size].
            epsilon: added to the mean square.
            out: of the shape of `x`, contiguous.
        """
        wide = x if x.dim() == 3 else x[:, None]
        numbers = (*wide.shape, wide.stride(0), wide.stride(1), int(weight.dtype == torch.float32))
        return self._program(_NORM, (x, weight, out), numbers, (epsilon,))

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> "Program":
        """Adds `x` to the residual and replaces `x` by the sum's RMS norm.

        Both are contiguous bfloat16 [rows, size].
        """
        rows, size = x.shape
        numbers = (rows, 1, size, size, size, int(weight.dtype == torch.float32))
        return self._program(_ADD_NORM, (x, weight, residual), numbers, (epsilon,))

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        epsilon: float,
        out: torch.Tensor,
    ) -> "Program":
        """Computes the layer norm of each row of `x`, [rows, size].

        All are contiguous and of the same type, float32 or bfloat16.
        """
        numbers = (*x.shape, _is_narrow(x))
        return self._program(_LAYER_NORM, (x, weight, bias, out), numbers, (epsilon,))

    def add(self, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> "Program":
        """Adds contiguous tensors of equal shape and type, float32 or bfloat16."""
        return self._program(_ADD, (x, y, out), (out.numel(), _is_narrow(x)))

    def copy(self, x: torch.Tensor, out: torch.Tensor) -> "Program":
        """Copies a contiguous tensor of any type."""
        return self._program(_COPY, (x, out), (x.nbytes,))

    def gelu(self, x: torch.Tensor, out: torch.Tensor) -> "Program":
        """Computes GELU, by the error function, of a contiguous tensor in float32 or bfloat16."""
        return self._program(_GELU, (x, None, out), (out.numel(), _is_narrow(x)))

    def gate(self, x: torch.Tensor, activation: str, out: torch.Tensor) -> "Program":
        """Writes `activation(x[:, :size]) * x[:, size:]` to contiguous `out`; see `GATES`."""
        rows, size = out.shape
        return self._program(_GATE, (x, out), (rows, size, x.stride(0), GATES.index(activation)))

    def rotate(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None,
        head_size: int,
        cos_sin: torch.Tensor,
    ) -> "Program":
        """Applies rotary positions to the first values of each head, in place.

        Args:
            positions: int64 [tokens].
            query: bfloat16 [tokens, heads * head_size].
            key: bfloat16 [tokens, kv_heads * head_size].
            head_size: values of a head.
            cos_sin: bfloat16 [positions, rotated]: cosines, then sines.
        """
        other = query if key is None else key
        numbers = (
            positions.shape[0], query.shape[-1] // head_size, other.shape[-1] // head_size, head_size,
            cos_sin.shape[-1], query.stride(0), other.stride(0),
        )  # fmt: skip
        return self._program(_ROTATE, (positions, query, key, cos_sin), numbers)

    def shrink(
        self, x: torch.Tensor, packed: torch.Tensor, slots: torch.Tensor, out: torch.Tensor
    ) -> "Program":
        """Multiplies each row by the A matrices of its LoRA adapter.

        Args:
            x: bfloat16 [rows, k]; the values of a row are contiguous.
            packed: the matrices of every adapter slot, [slots, …] of results of `pack`.
            slots: int32 [rows]; rows with -1 are left as they are.
            out: bfloat16 [rows, columns], contiguous.
        """
        numbers = (x.shape[0], out.shape[1], x.shape[1], x.stride(0))
        return self._program(_SHRINK, (x, packed, slots, out), numbers)

    def expand(
        self,
        out: torch.Tensor,
        shrunk: torch.Tensor,
        packed: torch.Tensor,
        slots: torch.Tensor,
        sizes: Sequence[int],
    ) -> "Program":
        """Adds the product with the B matrices of each row's LoRA adapter to `out`, in place.

        Args:
            out: bfloat16 [rows, sum of sizes], contiguous.
            shrunk: bfloat16 [rows, parts * rank], from `shrink`.
            packed: by adapter slot, the panels of all parts, [slots, panels, rank / 2, 32, 2].
            slots: int32 [rows]; rows with -1 are left as they are.
            sizes: columns of each part, at most `lora_stack.MOST_PARTS`.
        """
        rank = shrunk.shape[1] // len(sizes)
        numbers = (*out.shape, rank, len(sizes), packed.shape[1], *itertools.accumulate(sizes))
        return self._program(_EXPAND, (out, shrunk, packed, slots), numbers)

    def attention(self, call: AttentionCall) -> "Program":
        """Attends as `Device.attend` does.

        The program takes the step's `AttentionPlan` when it runs.
        """
        params, output = call.params, call.output
        group = params.num_heads // params.num_kv_heads
        written = call.new_states or (None, None)
        strides = [0 if tensor is None else tensor.stride(0) for tensor in written]
        write = (params.num_kv_heads, params.head_size, *strides, output.stride(0))
        attend = (params.num_kv_heads, group, params.head_size, params.window, call.query.stride(0))
        tensors = (call.query, call.cache, output, call.sinks)
        return Program.join([
            self._program(_WRITE_CACHE, (*written, call.cache, output), write, num_plans=1),
            self._program(_ATTEND, tensors, attend, (params.scale, params.softcap), num_plans=1),
        ], num_plans=1)  # fmt: skip

    def attention_of_texts(self, call: AttentionCall) -> "Program":
        """Attends within consecutive texts; see `serves_texts`.

        The program takes the step's `TextsPlan` at run time. Outputs after packed texts are zeros. Padding
        of rows leaves the output unchanged, and no result reads it.
        """
        params, output = call.params, call.output
        assert call.key is not None
        assert call.value is not None
        numbers = (
            params.num_heads, params.num_heads // params.num_kv_heads, params.head_size, int(params.causal),
            params.window, call.query.stride(0), call.key.stride(0), call.value.stride(0), output.stride(0),
            output.shape[0], _is_narrow(output),
        )  # fmt: skip
        tensors = (call.query, call.key, call.value, output)
        return self._program(_ATTEND_TEXTS, tensors, numbers, (params.scale,), num_plans=1)

    def plan(self, block_size: int, step: PagedInput) -> AttentionPlan:
        """Returns the plan that programs of `attention` take for a step."""
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
    """Whether `Kernels.attention` serves such a layer."""
    return (
        dtype == torch.bfloat16
        and block_size % PANEL == 0
        and head_size % PANEL == 0
        and head_size <= MAX_HEAD_SIZE
        and num_heads // num_kv_heads <= _MAX_GROUP
    )


def serves_texts(call: AttentionCall) -> bool:
    """Whether `Kernels.attention_of_texts` serves such a call, which uses no cache."""
    params = call.params
    plain = not (params.softcap or params.sinks or params.slopes)
    tensors = (call.query, call.key, call.value, call.output)
    return (
        plain
        and params.head_size % PANEL == 0
        and all(
            each is not None
            and each.dtype == call.output.dtype
            and each.dtype in (torch.float32, torch.bfloat16)
            and each.stride()[1:] == (params.head_size, 1)
            for each in tensors
        )
    )


def _is_narrow(tensor: torch.Tensor) -> int:
    return int(tensor.dtype == torch.bfloat16)


class Program:
    """Kernels in order. A call runs them and takes a plan for each call of attention among them."""

    def __init__(
        self, library: ctypes.CDLL, ops: Sequence[Any], kept: Iterable[torch.Tensor], num_plans: int
    ) -> None:
        """Prepares the arguments of a run."""
        self._native = library
        self._kept = tuple(kept)
        self._num_plans = num_plans
        self._plans = (ctypes.c_void_p * max(1, num_plans))()
        self._ops = (_Op * len(ops))(*ops)
        following = None
        for op in reversed(self._ops):
            if op.kind in _PRODUCTS:
                op.at[_NEXT] = following
                following = op.at[1]
        for op, after in itertools.pairwise(self._ops):
            # Adapters read the layer's inputs, and so do not wait for its product.
            op.beside = op.kind in _PRODUCTS and after.kind == _SHRINK and op.at[0] == after.at[0]
        size = library.triptych_progress_bytes(len(ops)) + _LINE
        self._memory = ctypes.create_string_buffer(size)
        start = ctypes.addressof(self._memory)
        self._run = functools.partial(
            library.triptych_run, ctypes.addressof(self._ops), len(ops), ctypes.addressof(self._plans),
            -(-start // _LINE) * _LINE, torch.get_num_threads(),
        )  # fmt: skip

    @classmethod
    def join(cls, programs: "Sequence[Program]", num_plans: int | None = None) -> "Program":
        """Joins programs into a single program that runs them in order.

        Args:
            programs: at least one.
            num_plans: plans of the joined program if the programs share them; by default each brings its own.
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

    def __call__(self, *plans: AttentionPlan | TextsPlan) -> None:
        """Runs the kernels."""
        for index, plan in enumerate(plans):
            self._plans[index] = plan.address
        self._run()
