"""The interface between the worker and a device.

A device brings kernels: the layout of keys and values, and attention over it. It knows no requests, slots or
plans. Shapes are static on every device: prefill is a row of `chunk` tokens, decode is `bucket` rows of a
token each.
"""

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch.nn import functional

from protos.steps import GroupKind
from worker_svc.devices.attention import AttentionCall, AttentionParams, PackedPlan, RowsPlan, StepInput
from worker_svc.devices.lora_stack import LoraStack, StackShape, mask_of
from worker_svc.devices.quantized import QuantizedProducts
from worker_svc.devices.registry import DeviceOptions, DeviceSpec
from worker_svc.shapes import KvGroup

BlockCopies = Literal["none", "tensors", "runtime"]
"""How a device copies blocks: not at all, with tensor operators, or with a call of its runtime."""
ChunkStarts = Literal["whole", "anywhere", "exact"]
"""Where chunks may begin: at multiples of their size, anywhere, or anywhere with the same bits."""
ExpertActivation = Literal["silu", "gelu", "gelu_tanh", "swigluoai"]
"""Activation of an expert's gate; NPU kernels use the same names. For swigluoai see `gated`."""
EXPERT_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
}
"""The activations as functions of the gate, by name."""
# Of gpt-oss: bounds of gate and up projection, and the sigmoid's factor.
_SWIGLU_LIMIT, _SWIGLU_ALPHA = 7.0, 1.702


def gated(projected: torch.Tensor, activation: ExpertActivation) -> torch.Tensor:
    """Multiplies activated gates with up projections.

    Args:
        projected: [..., 2 * inner], all gates before all up projections. With swigluoai, as in gpt-oss, gates
            and up projections alternate; both are clamped, and 1 is added to the up projection.
        activation: of the gates.

    Returns:
        [..., inner].
    """
    if activation != "swigluoai":
        gate, up = projected.chunk(2, dim=-1)
        return EXPERT_ACTIVATIONS[activation](gate) * up
    gate, up = projected.unflatten(-1, (-1, 2)).unbind(-1)
    gate, up = gate.clamp(max=_SWIGLU_LIMIT), up.clamp(-_SWIGLU_LIMIT, _SWIGLU_LIMIT)
    activated: torch.Tensor = gate * torch.sigmoid(gate * _SWIGLU_ALPHA) * (up + 1)
    return activated


class Device(abc.ABC):
    """A kind of accelerator. An instance holds no model and no cache."""

    spec: ClassVar[DeviceSpec]
    """The device's row in the registry."""
    torch_device: ClassVar[torch.device]
    """Where weights, caches and the batch's state live."""
    block_size_multiple: ClassVar[int]
    """A block size must be a multiple of this many tokens."""
    default_block_size: ClassVar[int]
    """Tokens of a block if no setting says otherwise."""
    default_chunk: ClassVar[int]
    """Tokens of a prefill chunk if no setting says otherwise."""
    default_max_num_seqs: ClassVar[int]
    """Slots if no setting says otherwise."""
    default_level: ClassVar[int] = 1
    """Optimization level; see `graph_runner.GraphOptions`."""
    highest_level: ClassVar[int] = 3
    """The highest optimization level that the device supports."""
    defers_weights: bool = False
    """Whether loaded weights stay on the host until the device's graphs are compiled."""
    weights_are_constants: ClassVar[bool] = False
    """Whether compiled code contains the weights."""
    compiler_packages: ClassVar[tuple[str, ...]] = ()
    """Packages that compiled code depends on, besides PyTorch, Triton and vLLM. Their versions count."""
    packs_texts: ClassVar[bool] = False
    """Whether a step of a pooling model may hold consecutive texts, see `PackedPlan`. Many graphs are
    affordable there, as recorded kernels cost little time and memory."""
    has_own_compiler: ClassVar[bool] = False
    """Whether `compile` runs a compiler that keeps its own cache in the folder of `use_code_folder`."""
    block_dim: int = 0
    """Which dimension of a layer's cache counts the blocks."""
    caches_are_inputs: ClassVar[bool] = False
    """Whether each layer's cache is a separate tensor that the layer gets with its plan, as captured graphs
    need it."""
    chunks_start_anywhere: ClassVar[bool] = True
    """Whether a prefill chunk may start at any position, or only at multiples of its size."""
    captures: ClassVar[bool] = False
    """Whether `capture` does more than return its argument."""
    runs_ahead: ClassVar[bool] = False
    """Whether kernels run in order while the host continues, so the host may launch a step before reading
    the previous results. Such a device overrides `start_reading`."""

    quantized: ClassVar[QuantizedProducts] = QuantizedProducts()
    """Products with quantized weights."""

    def __init__(self, options: DeviceOptions | None = None) -> None:
        """Allocates nothing; `options` are the defaults if `None`."""
        self.options = options or DeviceOptions()

    @property
    def name(self) -> str:
        """The device's name in the setting and on the wire."""
        return self.spec.name

    def use_code_folder(self, folder: Path | None) -> None:  # noqa: B027 - optional
        """Sets the folder of compiled code, or `None`, and drops earlier results of `compile`."""

    def release_unused(self) -> None:  # noqa: B027 - a host's allocator keeps nothing
        """Returns freed memory that the device's allocator still caches."""

    def code_target(self) -> str:
        """Returns the target hardware of compiled code, equal on machines that can share it."""
        return self.product_name()

    @abc.abstractmethod
    def check_available(self) -> None:
        """Checks for the device and its software on this machine.

        Raises:
            ConfigurationRefused: names the missing part.
        """

    @property
    def collectives(self) -> str:
        """The backend of `torch.distributed` that joins tensors of these devices."""
        return "gloo"

    @property
    def states_device(self) -> torch.device:
        """The place of hidden states on their way between the stages of a pipeline."""
        return self.torch_device

    @property
    def window_kind(self) -> GroupKind:
        """How the device's own kernels store a sliding window."""
        return GroupKind.PAGED_WINDOW

    @property
    def sorts_rows(self) -> bool:
        """Whether kernels need the rows of a decode step in descending order of length."""
        return False

    @property
    def default_collectives(self) -> str:
        """The backend of the default process group, which holds all ranks of a replica."""
        return "gloo"

    def prepare_ranks(self, master: str) -> None:  # noqa: B027 - optional
        """Prepares for process groups of ranks that meet at host:port, an address of rank 0's host.

        Raises:
            Unavailable: if the device's collectives cannot use the address.
        """

    def identity(self) -> str:
        """Returns the device's unique identity; empty if ranks of a stage may share it."""
        return ""

    def use_ranks(self, groups: Mapping[str, Sequence[int]]) -> None:  # noqa: B027 - optional
        """Tells the device's compiler the ranks of the process groups in its graphs, by the groups' names."""

    @abc.abstractmethod
    def product_name(self) -> str:
        """Returns the device's name for people."""

    @abc.abstractmethod
    def free_memory(self) -> int:
        """Returns the bytes that are free now for weights, caches and graphs."""

    @abc.abstractmethod
    def cache_shape(self, group: KvGroup, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Returns the shape of a layer's cache. Dimension `block_dim` counts blocks, the null block too."""

    def place_weights(self, model: torch.nn.Module) -> None:  # noqa: B027 - most models are built in place
        """Moves a model's loaded weights to where the device's graphs read them."""

    def check_sizes(self, chunk: int, block_size: int) -> None:  # noqa: B027 - a device may take all sizes
        """Checks the tokens of the largest chunk and of a paged block against each other.

        Raises:
            ConfigurationRefused: names the flags to change.
        """

    def check_attention(self, params: AttentionParams) -> None:  # noqa: B027 - a device may serve all layers
        """Checks that the device's kernels serve such a layer; called once for each layer with a cache.

        Raises:
            ConfigurationRefused: names the unsupported part.
        """

    def compile(
        self,
        function: Callable[..., torch.Tensor],
        *,
        by_shape: bool = False,  # noqa: ARG002 - for devices with a compiler
    ) -> Callable[..., torch.Tensor]:
        """Returns the function in the form that the device runs; by default the function itself.

        It takes tensors from anywhere. Its results are where the device computes, and valid until its next
        call with these shapes.

        Args:
            function: a function of tensors.
            by_shape: whether the shapes of its arguments alone identify a graph: the function reads nothing
                else that differs between calls.
        """
        return function

    def bind(
        self, function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> tuple[Callable[..., torch.Tensor], torch.Tensor]:
        """Calls a function around a single result of `compile`.

        Returns:
            Its compiled graph, and the result of this call. Calls of the graph read other tensors than their
            arguments where this call read them, such as those of attention plans, which `plan` overwrites.

        Raises:
            ConfigurationRefused: if the function is not a single graph.
        """
        return function, function(*inputs)

    def compile_argmax(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Returns a function that finds the largest logit of each row on the device.

        It takes logits [rows, vocab] and returns token ids [rows]. `None` if the device computes where the
        batch's state is: sampling then reads the logits in place.
        """
        return None

    def compile_draw(self) -> Callable[..., torch.Tensor] | None:
        """Returns a function that draws a token of each row on the device, with the device's random numbers.

        It takes logits [rows, vocab], temperatures, float32 [rows], `top_k`, int32 [rows], and `top_p`,
        float32 [rows], and returns token ids [rows]. `None` if the device does not draw.
        """
        return None

    def start_reading(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Starts to copy a tensor to the host.

        Returns:
            A function that waits for the copy and returns it. On a device that runs ahead, the copy holds
            the tensor's present values even if later kernels overwrite them.
        """
        return tensor.cpu

    def capture(
        self,
        function: Callable[..., tuple[torch.Tensor, ...]],
        examples: Sequence[torch.Tensor],  # noqa: ARG002 - for devices that run it ahead
    ) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Captures a function so that calling it costs as little as the device allows.

        Args:
            function: a function of tensors. It must not wait for the device, and its work must depend on
                shapes alone.
            examples: example arguments; `function` may be called on them a few times.

        Returns:
            A function of arguments of the same shapes. Its results are valid until its next call.
        """
        return function

    def clear_block(self, caches: torch.Tensor, block: int) -> None:
        """Zeroes a block in the caches [layers, …] of some layers, each of `cache_shape`."""
        caches.select(1 + self.block_dim, block).zero_()

    def block_copies(self, groups: Sequence[KvGroup]) -> BlockCopies:
        """Returns how the device copies blocks of these groups.

        Before graphs exist, returns the device's expectation.
        """
        return "tensors" if groups else "none"

    def copy_block(self, caches: Sequence[torch.Tensor], source: int, target: int, num_tokens: int) -> None:  # noqa: ARG002 - for other devices
        """Copies a block's leading tokens over another block, in all layers of a KV group.

        Args:
            caches: the group's caches, each [layers, …] of some layers.
            source: the block to copy.
            target: the block to write.
            num_tokens: tokens to copy. The rest of the target is then zeros or the source's.
        """
        for each in caches:
            each.select(1 + self.block_dim, target).copy_(each.select(1 + self.block_dim, source))

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocates zeroed memory on the device.

        Raises:
            RuntimeError: if there is not enough.
        """
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    @abc.abstractmethod
    def plan(self, group: KvGroup, block_size: int, step: StepInput) -> Any:
        """Prepares a step's attention for a group, for `attend` of all its layers.

        `step` is an `InPlaceInput` for in-place groups, else a `PagedInput`. On a device with its own
        compiler, the next plan of the group for a step of this shape overwrites this plan's tensors.
        """

    @abc.abstractmethod
    def attend(self, call: AttentionCall, plan: Any) -> None:
        """Writes the call's keys and values to the cache, then attends as this step's `plan` says."""

    def bind_attention(self, call: AttentionCall) -> Callable[[Any], None]:
        """Returns `attend_step` with fixed tensors, for graphs; each step calls it with its plan."""
        return functools.partial(self.attend_step, call)

    def lower(self, op: Any, args: Sequence[Any], result: Any) -> Callable[[], Any] | None:  # noqa: ARG002 - optional
        """Returns an operator's call with fixed tensors, for graphs; `None` if the device has no own kernel.

        `result` has the tensors to write, or is `None` if the operator writes its arguments.
        """
        return None

    def is_exact(self, operator: str, kernel: Callable[..., Any]) -> bool:  # noqa: ARG002 - optional
        """Whether a kernel of a graph computes each token with the same bits in any chunk and decode step."""
        return False

    def fuse(
        self, kernels: Sequence[Callable[..., Any]], num_plans: Sequence[int]
    ) -> Sequence[tuple[Callable[..., Any], int]]:
        """Merges consecutive kernels of a graph where the device can.

        Returns kernels of the same work in the same order, each with its number of attention plans.
        """
        return list(zip(kernels, num_plans, strict=True))

    def run_experts(
        self,
        hidden: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        weights: torch.Tensor,
        activation: ExpertActivation,
        biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Runs the gated MLPs of an expert layer and sums their outputs with the router's weights.

        Every expert computes every token, because the routing is unknown when a graph is built: two batched
        products of static shape. This is at least twice the necessary arithmetic, but the weights are read
        once, and reading them dominates decoding.

        Args:
            hidden: [tokens, hidden].
            gate_up: [experts, 2 * inner, hidden]: each expert's gate and up projection, in the order of
                `gated`.
            down: [experts, hidden, inner].
            weights: [tokens, experts]; 0 for experts that the token does not use.
            activation: of the gates.
            biases: of both projections, [experts, 2 * inner] and [experts, hidden]; `None` if they have none.

        Returns:
            [tokens, hidden].
        """
        projected = torch.matmul(hidden, gate_up.transpose(1, 2))
        if biases is not None:
            projected = projected + biases[0][:, None]
        each = torch.matmul(gated(projected, activation), down.transpose(1, 2))
        if biases is not None:
            each = each + biases[1][:, None]
        shares = weights.t().unsqueeze(-1)
        # An unused expert may overflow, and 0 times infinity is NaN.
        return (each * shares).masked_fill(shares == 0, 0).sum(dim=0)

    def lora_stack(self, shape: StackShape) -> LoraStack:
        """Returns empty memory for a layer's LoRA adapters.

        Raises:
            RuntimeError: if there is not enough.
        """
        a, b = (
            torch.zeros(size, dtype=shape.dtype, device=self.torch_device) for size in LoraStack.sizes(shape)
        )
        return LoraStack(shape, a, b)

    def adapter_bytes(self, shape: StackShape) -> int:
        """Returns the memory of `lora_stack`'s result, bytes."""
        return LoraStack.num_bytes(shape)

    def select_adapters(self, slots: torch.Tensor, shape: StackShape) -> torch.Tensor:
        """Returns the stacks' selection of adapters by row, an input of the step's graph; see `mask_of`."""
        return mask_of(slots, shape)

    def plan_rows(self, lengths: torch.Tensor, row_len: int, params: AttentionParams) -> Any:
        """Prepares a step of a pooling model for layers with these parameters; see `RowsPlan.of`."""
        return RowsPlan.of(lengths, row_len, params)

    def attend_rows(self, call: AttentionCall, plan: RowsPlan) -> None:
        """Attends within each row, without a cache or sinks. The outputs of padding mean nothing."""
        params = call.params
        assert call.key is not None
        assert call.value is not None
        query, key, value = (by_row(each, plan, params) for each in (call.query, call.key, call.value))
        attended = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=plan.mask, scale=params.scale,
            enable_gqa=params.num_heads != params.num_kv_heads,
        )  # fmt: skip
        by_row(call.output, plan, params).copy_(attended)

    def plan_packed(self, lengths: torch.Tensor, params: AttentionParams) -> Any:
        """Prepares a step of consecutive texts for layers with these parameters; see `PackedPlan.of`."""
        return PackedPlan.of(lengths, params)

    def attend_packed(self, call: AttentionCall, plan: PackedPlan) -> None:
        """Attends within each text, without a cache. The outputs of padding, after all texts, are zeros."""
        assert call.key is not None
        assert call.value is not None
        call.output[plan.num_tokens :].zero_()
        for group in plan.groups:
            query, key, value = (
                each.index_select(0, group.sources) for each in (call.query, call.key, call.value)
            )
            attended = call.output.new_empty((len(group.sources), *call.output.shape[1:]))
            self.attend_rows(replace(call, query=query, key=key, value=value, output=attended), group.rows)
            call.output.index_copy_(0, group.targets, attended.index_select(0, group.real))

    def attend_step(self, call: AttentionCall, plan: Any) -> None:
        """Attends within rows, within texts or over the cache, as the plan says."""
        if isinstance(plan, RowsPlan):
            self.attend_rows(call, plan)
        elif isinstance(plan, PackedPlan):
            self.attend_packed(call, plan)
        else:
            self.attend(call, plan)


def by_row(states: torch.Tensor, plan: RowsPlan, params: AttentionParams) -> torch.Tensor:
    """Views states [tokens, heads, head_size] of a pooling model as [rows, heads, row_len, head_size]."""
    rows, row_len = plan.mask.shape[0], plan.mask.shape[-1]
    return states.view(rows, row_len, -1, params.head_size).transpose(1, 2)


def is_host(device: torch.device) -> bool:
    """Whether tensors on the device are in the host's memory."""
    return device.type == "cpu"


def takes_page_locked(device: torch.device) -> bool:
    """Whether copies to the device from page-locked memory take their place in its stream.

    From ordinary memory, a copy to such a device waits for all earlier launches.
    """
    return device.type == "cuda"


def upload(
    values: Sequence[float] | Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Returns numbers, or rows of equal length, as a tensor on the device, without waiting for its work."""
    # The allocator keeps page-locked memory until the copy is done.
    host = torch.tensor(values, dtype=dtype, pin_memory=takes_page_locked(device))
    return host.to(device, non_blocking=True)
