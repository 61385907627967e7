"""Rebellions NPUs: whole graphs for rebel-compiler, with attention as the compiler's own operators.

Weights, graph inputs and caches are tensors on torch's device "rbln", unless device tensors are switched
off; the batch's state and sampling stay on the host. The operators' namespace decides how caches lie in
memory; see `operators`. Arguments and shapes follow the wheels of vllm-rbln 0.12.0.
"""

import functools
import os
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import psutil
import torch
from torch import _dynamo as dynamo

from protos.errors import ConfigurationRefused
from protos.steps import GroupKind
from worker_svc.devices.attention import (
    AttentionCall,
    AttentionParams,
    InPlaceInput,
    PagedInput,
    RowsPlan,
    StepInput,
)
from worker_svc.devices.base import (
    EXPERT_ACTIVATIONS,
    BlockCopies,
    Device,
    ExpertActivation,
    by_row,
)
from worker_svc.devices.lora_stack import LoraStack, StackShape
from worker_svc.devices.quantized import QuantizedProducts, QuantizedWeights
from worker_svc.devices.rbln import operators
from worker_svc.devices.rbln.bound_graph import CallRecorder
from worker_svc.devices.rbln.check_backend import CheckBackend, MetaMemory
from worker_svc.devices.rbln.memory import KvMemory, RuntimeMemory, TensorMemory, move_to_npu, on_host, on_npu
from worker_svc.devices.rbln.operators import (
    CUSTOM,
    MAX_TOP_P,
    TRITON,
    CallForm,
    Namespace,
    call_form,
    emit_argmax,
    emit_experts,
    emit_top_k_top_p,
)
from worker_svc.devices.rbln.vendor import Vendor, target, use_addresses
from worker_svc.devices.registry import RBLN, DeviceOptions, DeviceSpec
from worker_svc.shapes import NULL_BLOCK, KvGroup

BITS_VARIABLE: Final = "RBLN_QUANT_BITS"
"""Where the compiler reads the bits of a code."""
_GROUP: Final = 64
_GROUPS: Final = (_GROUP, 2 * _GROUP, None)


class NpuProducts(QuantizedProducts):
    """The pattern with the vendor's groups."""

    def check(self, bits: Collection[int], groups: Collection[int | None]) -> None:
        """Tells the compiler the number of bits."""
        if len(set(bits)) > 1:
            raise ConfigurationRefused(
                f"an NPU takes weights of one size, and the checkpoint has {' and '.join(map(str, sorted(bits)))} bits;"
                " choose another checkpoint, or use `triptych quantize --lm-head keep`"
            )
        if other := [group for group in groups if group not in _GROUPS]:
            raise ConfigurationRefused(
                f"an NPU takes groups of {_GROUP} or {2 * _GROUP} inputs or a scale per output channel, and the"
                f" checkpoint has groups of {other[0]}; choose another checkpoint"
            )
        os.environ[BITS_VARIABLE] = str(next(iter(bits)))

    def num_bytes(self, outputs: int, inputs: int, groups: int, bits: int, dtype: torch.dtype) -> int:
        return super().num_bytes(outputs, inputs, groups * _repeats(inputs, groups), bits, dtype)

    def layer(self, weights: QuantizedWeights, dtype: torch.dtype, *, wide: bool) -> torch.nn.Module:
        repeats = _repeats(weights.codes.shape[1], weights.scales.shape[1])
        scales = weights.scales.repeat_interleave(repeats, dim=1)
        return super().layer(QuantizedWeights(weights.codes, scales, weights.bits), dtype, wide=wide)


def _repeats(inputs: int, groups: int) -> int:
    return 2 if groups > 1 and inputs // groups == 2 * _GROUP else 1


_LARGEST_BLOCK: Final = 16_384
# The chip that stores windows in paged blocks.
_PAGES_WINDOWS: Final = "RBLN-CR13"
# The head sizes that the kernels are built for.
_HEAD_SIZES = (32, 64, 80, 96, 128, 160, 192, 224, 256)


@dataclass(frozen=True)
class RblnPlan:
    """The data that a group's layers share in a step: an operator and its arguments except states.

    All shapes are static.
    """

    operator: str
    """The operator's name, with its `_prefill` or `_decode`."""
    rows: int
    """Rows of the step."""
    query_len: int
    """Tokens of each row."""
    is_sorted: bool
    """Whether rows descend by length."""
    block_tables: torch.Tensor
    """[partitions] for a chunk, [rows, partitions] for a decode step."""
    seq_idx: torch.Tensor | None = None
    """[rows, 1]: position of each row's first token."""
    cache_seq_len: torch.Tensor | None = None
    """[rows, 1]: tokens in the block before the step; 0 in padded rows."""
    cache_offset: torch.Tensor | None = None
    """[rows, 1]: tokens in the block after the step; 0 in padded rows."""


class RblnDevice(Device):
    """A Rebellions NPU, or, with backend `rbln-check`, a CPU that takes its place."""

    namespace: Namespace
    """The attention operators' namespace."""
    backend: CheckBackend
    """The backend `rbln-check`, with the accepted graphs."""
    memory: MetaMemory
    """The memory of `rbln-check` for the host's handles of caches."""

    spec: ClassVar[DeviceSpec] = RBLN
    torch_device: ClassVar[torch.device] = torch.device("cpu")
    block_size_multiple: ClassVar[int] = 1024
    default_block_size: ClassVar[int] = 1024
    default_chunk: ClassVar[int] = 128
    default_max_num_seqs: ClassVar[int] = 1
    caches_are_inputs: ClassVar[bool] = True
    chunks_start_anywhere: ClassVar[bool] = False
    has_own_compiler: ClassVar[bool] = True
    default_level: ClassVar[int] = 1
    highest_level: ClassVar[int] = 1
    weights_are_constants: ClassVar[bool] = True
    quantized: ClassVar[NpuProducts] = NpuProducts()
    compiler_packages: ClassVar[tuple[str, ...]] = ("rebel-compiler", "torch-rbln")

    def __init__(self, options: DeviceOptions | None = None) -> None:
        """Without options, it uses the vendor's backend and the compiler's own kernels."""
        super().__init__(options)
        options = self.options
        self._is_check = options.is_simulated
        self.defers_weights = not self._is_check
        self.namespace = TRITON if options.rbln_use_custom_kernel else CUSTOM
        self.block_dim = 1 if self.namespace == TRITON else 0
        # The vendor's order: the optimized form, else the custom one, else plain operators. Both forms are
        # one operator today.
        self._has_expert_kernel = options.rbln_moe_use_opt_kernel or options.rbln_moe_custom_kernel
        # As the plugin has them; all its other integers are int32.
        self._positions = torch.int32 if self.namespace == TRITON else torch.int64
        self.memory = MetaMemory()
        self.backend = CheckBackend(self.memory)
        self._calls = CallRecorder()
        self._vendor = Vendor(options, self._calls)
        self._has_tensors = options.rbln_use_device_tensor and not self._is_check
        self._kv_memory: KvMemory | None = None
        self._code_folder: Path | None = None
        self._compiled: dict[Callable[..., torch.Tensor], Callable[..., torch.Tensor]] = {}
        # By function, shapes and types.
        self._bound: dict[Hashable, Callable[..., torch.Tensor]] = {}
        # Where graphs read the plans of steps: by group and shape, and masks by kind of layer and shape.
        self._plans: dict[Hashable, RblnPlan] = {}
        self._masks: dict[Hashable, RowsPlan] = {}
        self._scales: dict[float, torch.Tensor] = {}
        self._forms: dict[str, CallForm] = {}

    def check_available(self) -> None:
        if not self._is_check:
            self._vendor.check()
            return
        operators.register_all()

    @functools.cached_property
    def _chip(self) -> str:
        """The NPU's name; empty for `rbln-check` without a target, which serves all windows."""
        if self._is_check:
            return target() or ""
        return self._vendor.chip()

    @property
    def window_kind(self) -> GroupKind:
        """In place, except on chips with a kernel for paged windows."""
        return GroupKind.PAGED_WINDOW if self.sorts_rows else GroupKind.IN_PLACE_WINDOW

    @functools.cached_property
    def sorts_rows(self) -> bool:
        """For RBLN-CR13: its decode kernels read each partition for leading rows only, and stop early."""
        return self._chip.strip().upper() == _PAGES_WINDOWS

    @property
    def collectives(self) -> str:
        return "rbln-ccl" if self._has_tensors else "gloo"

    @property
    def states_device(self) -> torch.device:
        return torch.device("rbln") if self._has_tensors else self.torch_device

    @property
    def default_collectives(self) -> str:
        """The vendor's groups take their NPU from the default group, which must be the vendor's."""
        return self.collectives

    def prepare_ranks(self, master: str) -> None:
        if self._has_tensors:
            use_addresses(master)

    def use_ranks(self, groups: Mapping[str, Sequence[int]]) -> None:
        self._vendor.groups = {name: list(ranks) for name, ranks in groups.items()}

    def code_target(self) -> str:
        """Includes the options that change a graph.

        Raises:
            ConfigurationRefused: if the NPU's name is unknown.
        """
        kernels = "Triton kernels" if self.namespace == TRITON else "compiler kernels"
        experts = "the vendor's experts" if self._has_expert_kernel else "plain experts"
        strict = ", strict" if self.options.compile_strict else ""
        if self._is_check:
            return ", ".join(("rbln-check", *filter(None, [self._chip]), kernels, experts)) + strict
        tensors = "device tensors" if self._has_tensors else "meta tensors"
        chips = f"{self.options.rbln_num_devices} x {self._vendor.chip()}"
        return f"{chips}, {tensors}, {kernels}, {experts}{strict}"

    def use_code_folder(self, folder: Path | None) -> None:
        self._code_folder = folder
        self.backend.folder = folder
        if folder is not None:
            # Dynamo would reuse its code for shapes that it knows, and the new folder would stay empty.
            self._forget_code()

    def release_unused(self) -> None:
        """Graphs hold the memory of their caches, so they go, too."""
        self._kv_memory = None
        self._vendor.forget_graphs()
        self.backend.graphs.clear()
        self._plans.clear()
        self._masks.clear()
        self._forget_code()

    def _forget_code(self) -> None:
        if self._compiled:
            self._compiled.clear()
            self._bound.clear()
            torch.compiler.reset()

    def product_name(self) -> str:
        return "RBLN graphs on this host's CPU" if self._is_check else "RBLN NPU"

    def free_memory(self) -> int:
        """Assumes exclusive use of the NPU.

        Raises:
            ConfigurationRefused: if the NPU's memory size is unknown.
        """
        return int(psutil.virtual_memory().available) if self._is_check else self._vendor.memory_bytes

    def place_weights(self, model: torch.nn.Module) -> None:
        if self._has_tensors:
            move_to_npu(model)

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a host tensor where graphs take their inputs."""
        return tensor.to("rbln") if self._has_tensors else tensor

    def check_sizes(self, chunk: int, block_size: int) -> None:
        """Refuses sizes as vllm-rbln 0.12.1 does on every chip."""
        if not chunk <= block_size <= _LARGEST_BLOCK:
            raise ConfigurationRefused(
                f"an NPU needs --max-num-batched-tokens ({chunk}) <= --block-size ({block_size}) <="
                f" {_LARGEST_BLOCK}; change one of these flags"
            )

    def _buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns memory from which graphs read an input of all steps."""
        with torch.inference_mode(False):  # so that steps can write it in any mode
            return torch.empty(shape, dtype=dtype, device="rbln" if self._has_tensors else "cpu")

    def check_attention(self, params: AttentionParams) -> None:
        unserved = {
            "soft caps on attention scores": bool(params.softcap),
            "ALiBi": bool(params.slopes),
            "layers that read another layer's KV cache": not params.writes,
            f"heads of {params.head_size} elements": params.head_size not in _HEAD_SIZES,
            "attention sinks with RBLN_USE_CUSTOM_KERNEL=1": params.sinks and self.namespace == TRITON,
        }
        for what, needed in unserved.items():
            if needed:
                raise ConfigurationRefused(f"device rbln has no kernels for {what}; choose another model")
        for scale in {params.scale, 1.0} - self._scales.keys():
            self._scales[scale] = self._placed(torch.tensor(scale))

    def cache_shape(self, group: KvGroup, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """A block of an in-place group is a window; the kernels see `block_size / window` in a paged block.

        Raises:
            ConfigurationRefused: for windows without a kernel on this chip.
        """
        self._check_window(group)
        layer = group.layers[0]
        shape = [2, layer.num_kv_heads, 1, group.tokens_per_block(block_size), layer.head_size]
        shape.insert(self.block_dim, num_blocks)
        return tuple(shape)

    def _check_window(self, group: KvGroup) -> None:
        if group.window and self._chip and group.kind is not self.window_kind:
            kinds = ("in place", "paged") if self.sorts_rows else ("in paged blocks", "in-place")
            raise ConfigurationRefused(
                f"{self._chip} has no kernels for windows {kinds[0]}; use --window-kv {kinds[1]}"
            )
        if group.kind is GroupKind.PAGED_WINDOW and self.namespace == TRITON:
            raise ConfigurationRefused(
                "the Triton kernels do not serve windows in paged blocks; set RBLN_USE_CUSTOM_KERNEL=0"
            )

    @property
    def kv_memory(self) -> KvMemory:
        """Where caches lie. The Triton kernels of the older way take host tensors."""
        if self._kv_memory is None:
            if self._has_tensors:
                self._kv_memory = TensorMemory(on_npu)
            elif self.namespace == TRITON:
                self._kv_memory = TensorMemory(on_host)
            elif self._is_check:
                self._kv_memory = TensorMemory(self.memory.allocate, self.memory.resolve)
            else:
                self._kv_memory = RuntimeMemory(self._vendor.context(), self._vendor.runtimes)
        return self._kv_memory

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Without device tensors, the result may be a handle without memory."""
        return self.kv_memory.allocate(shape, dtype)

    def clear_block(self, caches: torch.Tensor, block: int) -> None:
        """Memory that the vendor's runtime owns stays as it is."""
        self.kv_memory.clear(caches, 1 + self.block_dim, block)

    def block_copies(self, groups: Sequence[KvGroup]) -> BlockCopies:
        return self.kv_memory.copies(groups)

    def copy_block(self, caches: Sequence[torch.Tensor], source: int, target: int, num_tokens: int) -> None:
        self.kv_memory.copy(caches, 1 + self.block_dim, source, target, num_tokens)

    def compile(
        self, function: Callable[..., torch.Tensor], *, by_shape: bool = False
    ) -> Callable[..., torch.Tensor]:
        """Compiles a static graph for each shape."""
        run = self._compiled_later(function, self._compiler)
        return self._bound_by_shape(run) if by_shape else run

    def compile_argmax(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Without device tensors, logits are on the host."""
        if not (self._is_check or self._has_tensors):
            return None
        compiler = self._compiler if self._is_check else self._vendor.compile_sampler
        return self._bound_by_shape(self._compiled_later(emit_argmax, compiler))

    def bind(
        self, function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> tuple[Callable[..., torch.Tensor], torch.Tensor]:
        buffers = [
            self._buffer(each.shape, each.dtype).copy_(each) if each.is_cpu else each for each in inputs
        ]
        return self._calls.bind(function, buffers)

    def _bound_by_shape(self, run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Returns a function that binds a graph at the first call with each shape."""

        def call(*arguments: torch.Tensor) -> torch.Tensor:
            key = run, *((each.shape, each.dtype) for each in arguments)
            bound = self._bound.get(key)
            if bound is not None:
                return bound(*arguments)
            self._bound[key], result = self.bind(run, arguments)
            return result

        return call

    def compile_draw(self) -> Callable[..., torch.Tensor] | None:
        """Caps `top_p`, so the least probable tokens are never drawn."""
        if not self.options.sampling_on_device:
            return None
        compiler = self._compiler if self._is_check else self._vendor.compile_sampler
        draw = self._bound_by_shape(self._compiled_later(emit_top_k_top_p, compiler))

        def capped(
            logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
        ) -> torch.Tensor:
            return draw(logits, temperature, top_k, top_p.clamp(max=MAX_TOP_P))

        return capped

    def _compiled_later(
        self,
        function: Callable[..., torch.Tensor],
        compiler: Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]],
    ) -> Callable[..., torch.Tensor]:
        """Returns a function that calls the compiler when it runs first.

        Before, the folder of compiled code is unknown.
        """

        def run(*arguments: Any) -> torch.Tensor:
            if function not in self._compiled:
                self._compiled[function] = compiler(function)
            try:
                with dynamo.config.patch(recompile_limit=64):
                    return self._compiled[function](*map(self._placed, arguments))
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
        if not self._is_check:
            return self._vendor.compile(function, self._code_folder)
        # Each function gets its own backend object: torch shares code between functions with equal code and
        # backend.
        return torch.compile(
            function,
            backend=self._calls.watch(self.backend),
            dynamic=False,
            fullgraph=True,
            options={"guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe},
        )

    def run_experts(
        self,
        hidden: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        weights: torch.Tensor,
        activation: ExpertActivation,
        biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Without biases, uses the vendor's operator unless it is switched off."""
        if self._has_expert_kernel and biases is None and activation in EXPERT_ACTIVATIONS:
            return emit_experts(hidden, gate_up, down, weights, activation)
        return super().run_experts(hidden, gate_up, down, weights, activation, biases)

    def plan(self, group: KvGroup, block_size: int, step: StepInput) -> RblnPlan:  # noqa: ARG002
        table = step.block_table
        query_len = (
            step.query_len if isinstance(step, InPlaceInput) else step.slot_mapping.shape[0] // table.shape[0]
        )
        key = group.group_id, group.kind, group.window, query_len, table.shape
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._new_plan(group, step, query_len)
        plan.block_tables.copy_(table if query_len == 1 else table[0])
        if isinstance(step, InPlaceInput):
            assert plan.cache_seq_len is not None
            assert plan.cache_offset is not None
            plan.cache_seq_len.copy_(step.cache_seq_len)
            # The kernels skip rows that end at 0.
            plan.cache_offset.copy_(step.cache_offset.masked_fill(table == NULL_BLOCK, 0))
        else:
            assert plan.seq_idx is not None
            plan.seq_idx.copy_(_start(step, query_len))
        return plan

    def _new_plan(self, group: KvGroup, step: StepInput, query_len: int) -> RblnPlan:
        """Returns a plan without contents."""
        rows, partitions = shape = step.block_table.shape
        prefill, is_in_place = query_len > 1, isinstance(step, InPlaceInput)
        if is_in_place:
            operator = self._known(f"sliding_window_attention_naive_{'prefill' if prefill else 'decode'}")
        else:
            operator = self._paged_operator(group, partitions, prefill=prefill)
        by_row = (rows, 1)
        return RblnPlan(
            operator=operator,
            rows=rows,
            query_len=query_len,
            is_sorted=self.sorts_rows,
            block_tables=self._buffer((partitions,) if prefill else shape, torch.int32),
            seq_idx=None if is_in_place else self._buffer(by_row, self._positions),
            cache_seq_len=self._buffer(by_row, torch.int32) if is_in_place else None,
            cache_offset=self._buffer(by_row, torch.int32) if is_in_place else None,
        )

    def _paged_operator(self, group: KvGroup, partitions: int, *, prefill: bool) -> str:
        if group.window:
            return self._known("sliding_window_attention_v1")
        several = self._known(f"flash_causal_attention_naive_{'prefill' if prefill else 'decode'}")
        # If one block holds the longest sequence, a simpler kernel serves.
        return self._known(several.removeprefix("flash_")) if partitions == 1 else several

    def _known(self, operator: str) -> str:
        """Returns the operator's name once its schema is read, which a graph under compilation cannot do."""
        if operator not in self._forms:
            self._forms[operator] = call_form(self.namespace, operator)
        return operator

    def attend(self, call: AttentionCall, plan: RblnPlan) -> None:
        """Gives a chunk's padding finite values, as the graph does not know where padding starts.

        Raises:
            ConfigurationRefused: on an NPU, outside of a graph that is being compiled.
        """
        params, cache, sinks = call.params, call.cache, call.sinks
        if self._runs_eagerly():
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

        attended = operators.emit(
            self._forms[operator],
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
                "is_prompt_sorted": plan.is_sorted,
                # The plugin passes these for caches of any type.
                "k_quantize_scale": self._scales[1.0],
                "v_quantize_scale": self._scales[1.0],
            },
        )
        attended = attended.view(rows, params.num_heads, query_len, params.head_size).transpose(1, 2)
        call.output.copy_(attended.reshape(call.output.shape))

    def lora_stack(self, shape: StackShape) -> LoraStack:
        """The matrices are inputs of graphs, so other adapters need no other graph."""
        a, b = (self._placed(torch.zeros(size, dtype=shape.dtype)) for size in LoraStack.sizes(shape))
        return LoraStack(shape, a, b)

    def plan_rows(self, lengths: torch.Tensor, row_len: int, params: AttentionParams) -> RowsPlan:
        """The mask is a summand, because graphs get it as an input."""
        seen = super().plan_rows(lengths, row_len, params).mask
        # Infinity would do on a host. A finite number never becomes NaN, whatever a compiler makes of it.
        hidden = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        key = params.causal, params.window, hidden.shape
        if key not in self._masks:
            self._masks[key] = RowsPlan(self._buffer(hidden.shape, hidden.dtype))
        self._masks[key].mask.copy_(hidden)
        return self._masks[key]

    def attend_rows(self, call: AttentionCall, plan: RowsPlan) -> None:
        """Two matrix products and a softmax, for heads of any size.

        Raises:
            ConfigurationRefused: on an NPU, outside of a graph that is being compiled.
        """
        self._runs_eagerly()
        params = call.params
        assert call.key is not None
        assert call.value is not None
        query, key, value = (by_row(each, plan, params) for each in (call.query, call.key, call.value))
        groups = params.num_heads // params.num_kv_heads
        if groups > 1:
            key, value = (
                each.unsqueeze(2).expand(-1, -1, groups, -1, -1).reshape(query.shape) for each in (key, value)
            )
        scores = torch.matmul(query * params.scale, key.transpose(-1, -2)).float() + plan.mask
        attended = torch.matmul(scores.softmax(dim=-1).to(value.dtype), value)
        call.output.copy_(attended.transpose(1, 2).reshape(call.output.shape))

    def _runs_eagerly(self) -> bool:
        """Returns whether the caller runs outside of a graph that is being compiled.

        Raises:
            ConfigurationRefused: if it does so on an NPU.
        """
        if torch.compiler.is_compiling():
            return False
        if not self._is_check:
            raise ConfigurationRefused("--backend eager needs --rbln-backend rbln-check")
        return True


def _start(step: PagedInput, query_len: int) -> torch.Tensor:
    """Returns the position of each row's first token, [rows, 1]."""
    counts = 1 if query_len == 1 else step.query_start[1:] - step.query_start[:-1]
    return (step.seq_lens - counts)[:, None]
