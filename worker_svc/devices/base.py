"""What a worker asks of a device.

A device brings kernels: how keys and values lie in memory, how attention reads them. It knows nothing of requests, slots or plans;
and, whichever it is, the shapes it sees are static: prefill is one row of ``chunk`` tokens, decode is ``bucket`` rows of one token.
"""

import abc
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch.nn import functional

from worker_svc.plans.geometry import GroupKind, KvGroup


@dataclass(frozen=True)
class AttentionInput:
    """Where one step's tokens go in the cache of one KV group, and what they may see."""

    seq_lens: torch.Tensor
    """int32 [rows]: tokens of each row's sequence, those of this step included. Padded rows: 1."""
    query_start: torch.Tensor
    """int32 [rows + 1]: where each row's real tokens start among the step's tokens; the last entry is their number."""
    block_table: torch.Tensor
    """int32 [rows, width]: block ids in the order of positions. Unused entries and padded rows: the null block."""
    slot_mapping: torch.Tensor
    """int64 [tokens]: ``block * block_size + offset`` that each token is written to. Padding: in the null block."""
    num_tokens: int
    """Leading tokens that attend; the rest of a chunk is padding and gets zeros."""


@dataclass(frozen=True)
class InPlaceInput:
    """The same for a group whose window slides in place; names and shapes are those of the NPU's kernels.

    A row's block holds the last ``window`` tokens of its sequence, or all of them as long as they are fewer, oldest first from offset
    0. A step appends its keys and values behind them, attends, and keeps the last ``window`` of what is there then.
    """

    cache_seq_len: torch.Tensor
    """int32 [rows, 1]: tokens in each row's block when the step starts. Padded rows: 0."""
    cache_offset: torch.Tensor
    """int32 [rows, 1]: ``cache_seq_len`` plus the row's real tokens in this step. Padded rows: 1."""
    block_table: torch.Tensor
    """int32 [rows, 1]: each row's block. Padded rows: the null block."""
    query_len: int
    """Tokens of each row in this step, padding included: the chunk, or 1."""


def tensors_of(step: "AttentionInput | InPlaceInput") -> list[torch.Tensor]:
    """What of an input is on the device."""
    values = (getattr(step, each.name) for each in fields(step))
    return [value for value in values if isinstance(value, torch.Tensor)]


def with_tensors(step: "StepInput", tensors: Iterator[torch.Tensor]) -> "StepInput":
    """The input with others in their place."""
    names = [each.name for each in fields(step) if isinstance(getattr(step, each.name), torch.Tensor)]
    given: dict[str, Any] = {name: next(tensors) for name in names}
    return replace(step, **given)


@dataclass(frozen=True)
class RowsInput:
    """Whole prompts, one a row, padded at their ends; nothing is kept of them."""

    real: torch.Tensor
    """bool [rows, row_len]: which tokens are not padding. Every row begins with one that is not."""

    @classmethod
    def of(cls, lengths: torch.Tensor, row_len: int) -> "RowsInput":
        """Of the number of real tokens in each row, int64 [rows]."""
        return cls(torch.arange(row_len, device=lengths.device) < lengths[:, None])


StepInput = AttentionInput | InPlaceInput


@dataclass(frozen=True)
class AttentionShape:
    """What distinguishes the attention of one layer from that of another."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    """Factor on the scores before the softmax."""
    window: int
    """Tokens a query attends to, itself included; 0 for all."""
    softcap: float
    """Scores become ``softcap * tanh(scores / softcap)``; 0 for off."""
    writes: bool
    """False where the layer reads another layer's cache."""
    causal: bool = True
    """Whether a token sees only itself and those before it."""
    sinks: bool = False
    """Whether each head has a learned score that joins the softmax's denominator, as in gpt-oss; these come with each call."""


@dataclass(frozen=True)
class DeviceOptions:
    """Settings that only some devices have."""

    rbln_backend: Literal["rbln", "rbln-check"] = "rbln"
    """Who compiles an NPU's graphs; see the setting of that name."""
    rbln_use_custom_kernel: bool = False
    """Whether an NPU's attention runs in Triton kernels."""
    compile_only: bool = False
    """Compile for a device that this machine does not have."""
    compile_strict: bool = False
    """Tell the device's own compiler to refuse what it would otherwise run in parts."""
    rbln_moe_use_opt_kernel: bool | None = None
    """Whether an NPU's expert layers run in the vendor's operator; ``None``: where there is one."""
    rbln_moe_custom_kernel: bool = False
    """The same, asked before falling back to plain operators."""


ExpertActivation = Literal["silu", "gelu", "gelu_tanh"]
"""What an expert does to its gate; the names are those of NPU kernels, too."""
_ACTIVATIONS: dict[ExpertActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
}


class Device(abc.ABC):
    """One kind of accelerator. Instances hold no model and no cache."""

    name: ClassVar[str]
    """As in the setting and on the wire."""
    torch_device: ClassVar[torch.device]
    """Where weights, caches and the batch's state live."""
    block_size_multiple: ClassVar[int]
    """Tokens of which a block size must be a multiple."""
    default_block_size: ClassVar[int]
    default_chunk: ClassVar[int]
    default_max_num_seqs: ClassVar[int]
    """What the device is usually run with."""
    window_kind: ClassVar[GroupKind]
    """How the device's own kernels keep a window."""
    default_level: ClassVar[int] = 1
    """Of optimization; see ``graphs.GraphOptions``."""
    highest_level: ClassVar[int] = 3
    weights_come_later: bool = False
    """Whether weights that were loaded are still on the host, and come to the device with its graphs."""
    weights_are_constants: ClassVar[bool] = False
    """Whether compiled code holds the weights."""
    compiler_packages: ClassVar[tuple[str, ...]] = ()
    """Packages whose versions compiled code depends on, besides PyTorch, Triton and vLLM."""

    has_own_compiler: ClassVar[bool] = False
    """Whether :meth:`compile` calls a compiler, with a cache of its own in the folder that it is given."""

    def use_code_folder(self, folder: Path | None) -> None:  # noqa: B027 - a device without such a compiler has nothing to do
        """Where :meth:`compile` is to find and leave compiled code, forgetting what it compiled before; ``None``: leave nothing more."""

    def release_unused(self) -> None:  # noqa: B027 - most hosts have freed it by then
        """Gives memory back that was freed and that the device's allocator keeps for itself."""

    def code_target(self) -> str:
        """What kind of hardware compiled code is for: equal on machines that can run each other's."""
        return self.product_name()

    @abc.abstractmethod
    def check_available(self) -> None:
        """Does nothing if this machine has the device and its software.

        Raises:
            ConfigurationRefused: in one line, what is missing.
        """

    @abc.abstractmethod
    def product_name(self) -> str:
        """The device's name for people."""

    @abc.abstractmethod
    def free_memory(self) -> int:
        """Bytes that are free for weights, caches and graphs right now."""

    @abc.abstractmethod
    def cache_shape(self, group: KvGroup, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """The shape of the cache of one of the group's layers. Dimension ``block_dim`` counts the blocks.

        Args:
            group: of whose layers each gets such a cache.
            num_blocks: the null block included.
            block_size: of paged groups; see ``KvGroup.tokens_per_block``.
        """

    block_dim: int = 0
    """Which dimension of a layer's cache counts the blocks."""
    caches_are_inputs: ClassVar[bool] = False
    """Whether each layer's cache is a whole tensor of its own, handed to the layer with its plan: what captured graphs need."""
    chunks_start_anywhere: ClassVar[bool] = True
    """Whether a prefill chunk may start at any position, and not only at multiples of its size."""

    def check_attention(self, shape: AttentionShape) -> None:  # noqa: B027 - a device may serve all of them
        """Does nothing if the device's kernels serve such a layer; called once for each of a model's.

        Raises:
            ConfigurationRefused: in one line, what they do not serve.
        """

    def compile(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The function as the device runs it: unless a device says otherwise, as it is."""
        return function

    def synchronize(self) -> None:  # noqa: B027 - a host that computes by itself has nothing to wait for
        """Waits until the device has done all that was asked of it."""

    captures: ClassVar[bool] = False
    """Whether :meth:`capture` makes a difference."""

    def capture(
        self,
        function: Callable[..., tuple[torch.Tensor, ...]],
        examples: Sequence[torch.Tensor],  # noqa: ARG002 - for devices that run it ahead
    ) -> Callable[..., tuple[torch.Tensor, ...]]:
        """The function, as quick to call as the device can make it.

        Args:
            function: of tensors. It waits for nothing on the device, and what it does depends on shapes alone.
            examples: arguments; it may be called on them a few times.

        Returns:
            A function of arguments of the same shapes. Its results are valid until its next call.
        """
        return function

    def clear_block(self, caches: torch.Tensor, block: int) -> None:
        """Zeroes a block in some layers' caches [layers, …], each of :meth:`cache_shape`."""
        caches.select(1 + self.block_dim, block).zero_()

    def copy_block(self, caches: torch.Tensor, source: int, target: int) -> None:
        """Copies a block over another in some layers' caches [layers, …]."""
        caches.select(1 + self.block_dim, target).copy_(caches.select(1 + self.block_dim, source))

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory on the device.

        Raises:
            RuntimeError: if there is not enough.
        """
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    @abc.abstractmethod
    def plan(self, group: KvGroup, block_size: int, step: StepInput) -> Any:
        """Prepares one step's attention for a group; the result is handed to :meth:`attend` of each of its layers.

        Args:
            group: decides the kind of ``step``: in-place groups get an :class:`InPlaceInput`, the others an :class:`AttentionInput`.
            block_size: of paged groups.
            step: where the tokens go.
        """

    @abc.abstractmethod
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
        """Writes keys and values to the cache, then attends.

        Args:
            shape: the layer.
            query: [tokens, heads, head_size].
            key: [tokens, kv_heads, head_size]; unused if the layer reads another's cache.
            value: like ``key``.
            cache: the layer's cache, of :meth:`cache_shape`.
            plan: what :meth:`plan` made of this step.
            output: [tokens, heads, head_size], written in place.
            sinks: float32 [heads], scores of what is attended to and has no value; ``None`` for a layer without.
        """

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
        """:meth:`attend` with all of its tensors fixed, for graphs; the result is called with each step's plan."""

        def attend(plan: Any) -> None:
            self.attend(shape, query, key, value, cache, plan, output, sinks)

        return attend

    def lower(self, op: Any, args: Sequence[Any], result: Any) -> Callable[[], Any] | None:  # noqa: ARG002 - for devices with kernels of their own
        """One call of an operator with all of its tensors fixed, for graphs; ``None`` to call the operator itself.

        Args:
            op: the overload that was called.
            args: its arguments, given by position.
            result: what it is to write, or ``None`` if it writes its arguments.
        """
        return None

    def fuse(
        self, kernels: Sequence[Callable[..., Any]], num_plans: Sequence[int]
    ) -> Sequence[tuple[Callable[..., Any], int]]:
        """Kernels of a graph that run one after the other, as fewer ones where the device can.

        Args:
            kernels: made by :meth:`lower` or :meth:`bind_attention`, or any other function without arguments.
            num_plans: how many attention plans each of them is called with.

        Returns:
            Kernels that do the same in the same order, each with how many of the plans it takes.
        """
        return list(zip(kernels, num_plans, strict=True))

    def run_experts(
        self,
        hidden: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        weights: torch.Tensor,
        activation: ExpertActivation,
    ) -> torch.Tensor:
        """The gated MLPs of an expert layer, summed as the router weighs them.

        All experts compute all tokens, as which of them a token needs is not known when a graph is made: two batched products of
        static shape. Twice the arithmetic or more of what is asked for, but the weights are read once, which is what decoding costs.

        Args:
            hidden: [tokens, hidden].
            gate_up: [experts, 2 * inner, hidden]: each expert's gate, then its other factor.
            down: [experts, hidden, inner].
            weights: [tokens, experts]; 0 where an expert is not asked.
            activation: of the gates.

        Returns:
            [tokens, hidden].
        """
        gate, up = torch.matmul(hidden, gate_up.transpose(1, 2)).chunk(2, dim=-1)
        each = torch.matmul(_ACTIVATIONS[activation](gate) * up, down.transpose(1, 2))
        shares = weights.t().unsqueeze(-1)
        # An expert that nobody asked may overflow; 0 times that would be NaN.
        return (each * shares).masked_fill(shares == 0, 0).sum(dim=0)

    def attend_rows(
        self,
        shape: AttentionShape,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: RowsInput,
        output: torch.Tensor,
    ) -> None:
        """Attends within each row, without a cache.

        Args:
            shape: the layer; without a softcap or sinks, and without a window unless it is causal.
            query: [rows * row_len, heads, head_size].
            key: [rows * row_len, kv_heads, head_size].
            value: like ``key``.
            rows: which tokens are real; padding is seen by nobody, and what it gets means nothing.
            output: like ``query``, written in place.
        """
        count, row_len = rows.real.shape
        mask = rows.real[:, None, None, :]
        if shape.causal:
            seen = torch.arange(row_len, device=query.device)
            visible = seen <= seen[:, None]
            if shape.window:
                visible &= seen > seen[:, None] - shape.window
            # Padding behind a window would see nothing at all, which is NaN; it sees itself.
            mask = (mask & visible) | torch.eye(row_len, dtype=torch.bool, device=query.device)

        def by_row(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.view(count, row_len, -1, shape.head_size).transpose(1, 2)

        attended = functional.scaled_dot_product_attention(
            by_row(query), by_row(key), by_row(value), attn_mask=mask, scale=shape.scale,
            enable_gqa=shape.num_heads != shape.num_kv_heads,
        )  # fmt: skip
        output.view(count, row_len, shape.num_heads, shape.head_size).copy_(attended.transpose(1, 2))
