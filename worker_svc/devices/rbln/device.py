"""Rebellions NPUs: whole graphs for rebel-compiler, with attention as the compiler's own operators.

The operators' namespace also decides how caches lie in memory and where the host allocates them; see `ops`.
Arguments and shapes follow the wheels of vllm-rbln 0.12.0.
"""

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch
from torch import _dynamo as dynamo

from protos.errors import ConfigurationRefused
from protos.kv_groups import GroupKind
from worker_svc.devices.attention import AttentionCall, AttentionParams, InPlaceInput, PagedInput, StepInput
from worker_svc.devices.base import BlockCopies, Device, DeviceOptions, ExpertActivation
from worker_svc.devices.rbln.check_backend import CheckBackend, MetaMemory
from worker_svc.devices.rbln.ops import registry
from worker_svc.devices.rbln.ops.experts import emit_experts
from worker_svc.devices.rbln.ops.signatures import CUSTOM, TRITON, Namespace
from worker_svc.shapes.geometry import NULL_BLOCK, KvGroup

_VENDOR_PACKAGES = ("rebel", "torch_rbln")
# Variables that tell the compiler its target.
_TARGET_VARIABLES = ("RBLN_TARGET_SOC", "RBLN_FORCE_NPU_NAME")
# By prefix of an NPU's name, its memory less the system's share (vllm-rbln 0.12.0, v1/worker/utils.py).
_MEMORY = {"RBLN-CA": 16 * 2**30 - 288 * 2**20, "RBLN-CR": 144 * 2**30 - 4 * 2**30}
# The head sizes that the kernels are built for.
_HEAD_SIZES = (32, 64, 80, 96, 128, 160, 192, 224, 256)


@dataclass(frozen=True)
class RblnPlan:
    """What the layers of a group share in one step: an operator and its arguments besides states.

    All shapes are static.
    """

    operator: str
    """The operator's name, with its `_prefill` or `_decode`."""
    rows: int
    """Rows of the step."""
    query_len: int
    """Tokens of each row."""
    block_tables: torch.Tensor
    """[partitions] for a chunk, [rows, partitions] for a decode step."""
    seq_idx: torch.Tensor | None = None
    """[rows, 1]: position of each row's first token."""
    cache_seq_len: torch.Tensor | None = None
    """[rows, 1]: tokens in the block before the step; 0 in padded rows."""
    cache_offset: torch.Tensor | None = None
    """[rows, 1]: tokens in the block after the step; 0 in padded rows."""


class RblnDevice(Device):
    """A Rebellions NPU, or, with backend `rbln-check`, a CPU that stands in for it."""

    namespace: Namespace
    """The attention operators' namespace."""
    backend: CheckBackend
    """The stand-in's backend, with the graphs that it has accepted."""
    memory: MetaMemory
    """The stand-in's memory behind the handles that the host has of caches."""

    name: ClassVar[str] = "rbln"
    torch_device: ClassVar[torch.device] = torch.device("cpu")
    block_size_multiple: ClassVar[int] = 1024
    default_block_size: ClassVar[int] = 1024
    default_chunk: ClassVar[int] = 128
    default_max_num_seqs: ClassVar[int] = 1
    window_kind: ClassVar[GroupKind] = GroupKind.IN_PLACE_WINDOW
    caches_are_inputs: ClassVar[bool] = True
    chunks_start_anywhere: ClassVar[bool] = False
    has_own_compiler: ClassVar[bool] = True
    default_level: ClassVar[int] = 1
    highest_level: ClassVar[int] = 1
    weights_are_constants: ClassVar[bool] = True
    compiler_packages: ClassVar[tuple[str, ...]] = ("rebel-compiler", "torch-rbln")

    def __init__(self, options: DeviceOptions | None = None) -> None:
        """Without options, it uses the vendor's backend and the compiler's own kernels."""
        options = options or DeviceOptions()
        self._is_stand_in = options.rbln_backend == "rbln-check"
        self.defers_weights = not self._is_stand_in
        self.namespace = TRITON if options.rbln_use_custom_kernel else CUSTOM
        self.block_dim = 1 if self.namespace == TRITON else 0
        optimized = options.rbln_moe_use_opt_kernel
        self._wants_expert_kernel = bool(optimized or options.rbln_moe_custom_kernel)
        self._has_expert_kernel = self._wants_expert_kernel or (optimized is None and not self._is_stand_in)
        self._integers = torch.int32 if self.namespace == TRITON else torch.int64
        self.memory = MetaMemory()
        self.backend = CheckBackend(self.memory)
        self._compile_only = options.compile_only
        self._compile_strict = options.compile_strict
        self._code_folder: Path | None = None
        self._compiled: dict[Callable[..., torch.Tensor], Callable[..., torch.Tensor]] = {}
        self._scales: dict[float, torch.Tensor] = {}

    def check_available(self) -> None:
        """See the base class."""
        if self._is_stand_in:
            if self._wants_expert_kernel:
                raise ConfigurationRefused(
                    "rbln-check has no kernels for expert layers, which only the vendor's runtime has;"
                    " omit --rbln-moe-use-opt-kernel and --rbln-moe-custom-kernel"
                )
            registry.register()
            return
        missing = [name for name in _VENDOR_PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigurationRefused(
                f"device rbln needs the vendor's packages {' and '.join(missing)}; use --device cpu or cuda"
            )
        if self._compile_only and not any(variable in os.environ for variable in _TARGET_VARIABLES):
            raise ConfigurationRefused(
                f"compiling without an NPU needs its name; set {_TARGET_VARIABLES[0]},"
                " for example to RBLN-CA25"
            )

    def code_target(self) -> str:
        """See the base class. Includes the options that change a graph.

        Raises:
            ConfigurationRefused: if the NPU's name is unknown.
        """
        kernels = "Triton kernels" if self.namespace == TRITON else "compiler kernels"
        experts = "the vendor's experts" if self._has_expert_kernel else "plain experts"
        strict = ", strict" if self._compile_strict else ""
        return f"{self._chip()}, {kernels}, {experts}{strict}"

    def use_code_folder(self, folder: Path | None) -> None:
        """See the base class."""
        self._code_folder = folder
        self.backend.folder = folder
        if folder is not None and self._compiled:
            # Dynamo would reuse its code for shapes that it knows, and the new folder would stay empty.
            self._compiled.clear()
            torch.compiler.reset()

    def _chip(self) -> str:
        """Returns the NPU's name, for example "RBLN-CA25", from its sources in vllm-rbln's order."""
        if self._is_stand_in:
            return "stand-in"
        name = None
        if not self._compile_only:
            import rebel

            name = rebel.get_npu_name(0)
        name = name or next(
            (os.environ[variable] for variable in _TARGET_VARIABLES if variable in os.environ), None
        )
        if not name:
            raise ConfigurationRefused(
                f"the NPU does not report its name; set {_TARGET_VARIABLES[0]}, for example to RBLN-CA25"
            )
        return str(name)

    def product_name(self) -> str:
        """See the base class."""
        return "RBLN stand-in on this host's CPU" if self._is_stand_in else "RBLN NPU"

    def free_memory(self) -> int:
        """See the base class. Assumes that this process has the NPU to itself.

        Raises:
            ConfigurationRefused: if the NPU's memory size is unknown.
        """
        if self._is_stand_in:
            return int(psutil.virtual_memory().available)
        chip = self._chip()
        known = next((size for name, size in _MEMORY.items() if chip.upper().startswith(name)), None)
        if known is None:
            raise ConfigurationRefused(f"the memory size of an {chip} is unknown; set --kv-memory")
        return known

    def check_attention(self, params: AttentionParams) -> None:
        """See the base class."""
        unserved = {
            "soft caps on attention scores": bool(params.softcap),
            "layers that read another layer's KV cache": not params.writes,
            f"heads of {params.head_size} elements": params.head_size not in _HEAD_SIZES,
            "non-causal attention": not params.causal,
            "attention sinks with RBLN_USE_CUSTOM_KERNEL=1": params.sinks and self.namespace == TRITON,
        }
        for what, needed in unserved.items():
            if needed:
                raise ConfigurationRefused(f"device rbln has no kernels for {what}; choose another model")
        self._scales[params.scale] = torch.tensor(params.scale)

    def cache_shape(self, group: KvGroup, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """See the base class.

        A block of an in-place group is one window; the kernels see `block_size / window` in a paged block.

        Raises:
            ConfigurationRefused: for windows in paged blocks with the Triton kernels, which have no operator
                for them.
        """
        if group.kind is GroupKind.PAGED_WINDOW and self.namespace == TRITON:
            raise ConfigurationRefused(
                "the Triton kernels do not serve windows in paged blocks;"
                " use --window-kv in-place or RBLN_USE_CUSTOM_KERNEL=0"
            )
        layer = group.layers[0]
        shape = [2, layer.num_kv_heads, 1, group.tokens_per_block(block_size), layer.head_size]
        shape.insert(self.block_dim, num_blocks)
        return tuple(shape)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See the base class. The Triton kernels take host tensors, the others handles without memory."""
        if self.namespace == TRITON:
            return torch.zeros(shape, dtype=dtype)
        if self._is_stand_in:
            return self.memory.allocate(shape, dtype)
        return torch.empty(shape, dtype=dtype, device="meta")

    def clear_block(self, caches: torch.Tensor, block: int) -> None:
        """See the base class.

        Leaves the NPU's own memory alone: its kernels never read past a sequence's end.
        """
        if self._is_stand_in or not caches.is_meta:
            super().clear_block(self.memory.resolve(caches), block)

    def block_copies(self, groups: Sequence[KvGroup]) -> BlockCopies:
        """See the base class."""
        if self._is_stand_in or self.namespace == TRITON:
            return super().block_copies(groups)
        return "none"

    def copy_block(self, caches: Sequence[torch.Tensor], source: int, target: int, num_tokens: int) -> None:
        """See the base class."""
        super().copy_block([self.memory.resolve(each) for each in caches], source, target, num_tokens)

    def compile(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """See the base class. Compiles one static graph for each shape."""

        def run(*arguments: Any) -> torch.Tensor:
            if function not in self._compiled:  # earlier, the folder of its code is unknown
                self._compiled[function] = self._compiler(function)
            try:
                with dynamo.config.patch(recompile_limit=64):
                    return self._compiled[function](*arguments)
            except dynamo.exc.BackendCompilerFailed as error:
                if isinstance(error.inner_exception, ConfigurationRefused):
                    raise error.inner_exception from None
                raise
            except dynamo.exc.Unsupported as error:
                reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
                raise ConfigurationRefused(
                    f"device rbln: the model cannot be captured as one graph: {reason}"
                ) from error

        return run

    def _compiler(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        # Steps of one signature differ only in their tensors' contents, and shapes distinguish signatures.
        options: dict[str, Any] = {"guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe}
        backend: Any = "rbln"
        if self._is_stand_in:
            # Each function gets its own backend object: torch shares code between functions with equal code
            # and backend.
            backend = functools.partial(self.backend)
        else:
            mode = [("strict", self._compile_strict), ("compile_only", self._compile_only)]
            options["mode"] = [name for name, enabled in mode if enabled]
            if self._code_folder is not None:
                options["cache_dir"] = str(self._code_folder)
        return torch.compile(function, backend=backend, dynamic=False, fullgraph=True, options=options)

    def run_experts(
        self,
        hidden: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        weights: torch.Tensor,
        activation: ExpertActivation,
    ) -> torch.Tensor:
        """See the base class. Uses the vendor's operator unless it is switched off."""
        if self._has_expert_kernel:
            return emit_experts(hidden, gate_up, down, weights, activation)
        return super().run_experts(hidden, gate_up, down, weights, activation)

    def plan(self, group: KvGroup, block_size: int, step: StepInput) -> RblnPlan:  # noqa: ARG002
        """See the base class."""
        table = step.block_table.to(self._integers)
        rows = table.shape[0]
        if isinstance(step, InPlaceInput):
            prefill = step.query_len > 1
            return RblnPlan(
                operator=f"sliding_window_attention_naive_{'prefill' if prefill else 'decode'}",
                rows=rows,
                query_len=step.query_len,
                block_tables=table[0] if prefill else table,
                cache_seq_len=step.cache_seq_len.to(self._integers),
                # The kernels skip rows that end at 0.
                cache_offset=step.cache_offset.to(self._integers).masked_fill(table == NULL_BLOCK, 0),
            )
        query_len = step.slot_mapping.shape[0] // rows
        return RblnPlan(
            operator=self._paged_operator(group, table.shape[1], prefill=query_len > 1),
            rows=rows,
            query_len=query_len,
            block_tables=table[0] if query_len > 1 else table,
            seq_idx=_start(step).to(self._integers),
        )

    def _paged_operator(self, group: KvGroup, partitions: int, *, prefill: bool) -> str:
        if group.window:
            return "sliding_window_attention_v1"
        # If one block holds the longest sequence, a simpler kernel serves.
        operator = "causal_attention_naive" if partitions == 1 else "flash_causal_attention_naive"
        return f"{operator}_{'prefill' if prefill else 'decode'}"

    def attend(self, call: AttentionCall, plan: RblnPlan) -> None:
        """See the base class.

        A chunk's padding gets finite values instead of zeros, as the graph does not know where padding
        starts.

        Raises:
            ConfigurationRefused: on an NPU, outside of a graph that is being compiled.
        """
        params, cache, sinks = call.params, call.cache, call.sinks
        if not torch.compiler.is_compiling():
            if not self._is_stand_in:
                raise ConfigurationRefused("--backend eager needs --rbln-backend rbln-check")
            cache = self.memory.resolve(cache)
        assert call.key is not None
        assert call.value is not None
        rows, query_len, kv_heads = plan.rows, plan.query_len, params.num_kv_heads
        groups = params.num_heads // kv_heads
        scale = self._scales[params.scale]
        # The kernels for a single block take no sinks; those for many blocks also serve one.
        single_block = plan.operator.startswith("causal_")
        operator = f"flash_{plan.operator}" if single_block and sinks is not None else plan.operator

        def by_head(states: torch.Tensor, heads: int) -> torch.Tensor:
            """Reshapes [tokens, kv_heads * heads, size] to [rows, kv_heads, heads, query_len, size]."""
            states = states.view(rows, query_len, kv_heads * heads, params.head_size).transpose(1, 2)
            return states.reshape(rows, kv_heads, heads, query_len, params.head_size)

        attended = registry.emit(
            self.namespace,
            operator,
            {
                "q": by_head(call.query, groups),
                "k": by_head(call.key, 1),
                "v": by_head(call.value, 1),
                "kv_cache": cache,
                "scale": scale,
                "dummy": scale,
                "seq_idx": plan.seq_idx,
                "cache_seq_len": plan.cache_seq_len,
                "cache_offset": plan.cache_offset,
                "block_tables": plan.block_tables,
                "window_size": params.window,
                "is_causal": True,
                "sinks": None if sinks is None else sinks[:, None],
            },
        )
        attended = attended.view(rows, params.num_heads, query_len, params.head_size).transpose(1, 2)
        call.output.copy_(attended.reshape(call.output.shape))


def _start(step: PagedInput) -> torch.Tensor:
    """Returns the position of each row's first token, [rows, 1]."""
    counts = step.query_start[1:] - step.query_start[:-1]
    return (step.seq_lens - counts)[:, None]
