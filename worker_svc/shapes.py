"""Sizes that rooms share: a model by its configuration, its KV groups, and a deployment's static shapes."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from protos.errors import ConfigurationRefused
from protos.steps import GroupKind, PoolShape

# The null block of every group: padding reads and writes it, and no sequence gets it.
NULL_BLOCK = 0


@dataclass(frozen=True)
class AttentionLayer:
    """An attention layer of a model."""

    name: str
    """Unique in the model, for example "model.layers.0.self_attn.attn"."""
    num_heads: int
    """Query heads on this rank."""
    num_kv_heads: int
    """Key and value heads on this rank."""
    head_size: int
    """Elements of a head's key or value."""
    window: int
    """Tokens a query attends to, itself included; 0 for all."""
    dtype: torch.dtype
    """Element type of keys and values in the cache."""
    shares_with: str | None = None
    """The layer whose cache this layer reads instead of its own."""
    here: bool = True
    """Whether this rank holds the layer; other stages of a pipeline hold the rest."""
    latent: bool = False
    """Whether the cache holds keys alone, because values are parts of them (MLA)."""
    alibi: bool = False
    """Whether scores depend on the distance of tokens (ALiBi), which not all kernels serve."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's key and value, or latent vector, in this layer's cache."""
        states = 1 if self.latent else 2
        return states * self.num_kv_heads * self.head_size * self.dtype.itemsize


@dataclass(frozen=True)
class KvGroup:
    """Layers that share a block table: equal window, equal shapes."""

    group_id: int
    """Index in every list of groups, from 0 without gaps."""
    layers: tuple[AttentionLayer, ...]
    """In the model's order; never empty."""
    window_kind: GroupKind = GroupKind.PAGED_WINDOW
    """How the group uses KV memory for layers with a window; ignored otherwise."""

    @property
    def window(self) -> int:
        """Tokens that a query attends to; 0 for all."""
        return self.layers[0].window

    @property
    def kind(self) -> GroupKind:
        """How the group uses KV memory."""
        return self.window_kind if self.window else GroupKind.FULL

    @property
    def own_layers(self) -> tuple[AttentionLayer, ...]:
        """The layers of this rank."""
        return tuple(layer for layer in self.layers if layer.here)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's keys and values over the layers of this rank."""
        return sum(layer.bytes_per_token for layer in self.own_layers)

    def tokens_per_block(self, block_size: int) -> int:
        """Returns the tokens in a block of this group for paged blocks of `block_size` tokens."""
        return self.window if self.kind is GroupKind.IN_PLACE_WINDOW else block_size

    def table_width(self, shapes: "ShapeConfig") -> int:
        """Returns the number of entries in a row of the group's block table."""
        return 1 if self.kind is GroupKind.IN_PLACE_WINDOW else shapes.table_width

    def blocks_in_use(self, shapes: "ShapeConfig") -> int:
        """Returns the blocks needed at a time by a sequence of the longest length.

        A paged window needs the blocks attended by a chunk's first query and the blocks filled by the chunk.
        Neither end of this span needs to be a block boundary.
        """
        match self.kind:
            case GroupKind.FULL:
                return shapes.table_width
            case GroupKind.PAGED_WINDOW:
                span = self.window - 1 + shapes.chunk
                return min(shapes.table_width, math.ceil(span / shapes.block_size) + 1)
            case GroupKind.IN_PLACE_WINDOW:
                return 1

    def blocks_per_sequence(self, shapes: "ShapeConfig") -> int:
        """Returns the blocks per sequence of the longest length, including windows kept for prefix hits."""
        in_use, kept = self.blocks_in_use(shapes), shapes.windows_kept_per_slot
        match self.kind:
            case GroupKind.FULL:
                return in_use
            case GroupKind.PAGED_WINDOW:
                per_window = math.ceil(self.window / shapes.block_size) + 1
                return min(shapes.table_width, in_use + kept * per_window)
            case GroupKind.IN_PLACE_WINDOW:
                return in_use + kept

    def check_block_size(self, block_size: int) -> None:
        """Refuses a block size that is not a multiple of an in-place window.

        Raises:
            ConfigurationRefused: naming the window.
        """
        if self.kind is not GroupKind.IN_PLACE_WINDOW:
            return
        if self.window > block_size:
            raise ConfigurationRefused(
                f"an in-place window of {self.window} tokens needs a block size of at least {self.window},"
                f" got {block_size}; raise --block-size or use --window-kv paged"
            )
        if block_size % self.window:
            raise ConfigurationRefused(
                f"block size {block_size} is not a multiple of the in-place window of {self.window} tokens;"
                " change --block-size or use --window-kv paged"
            )


def group_layers(
    layers: Iterable[AttentionLayer], window_kind: GroupKind = GroupKind.PAGED_WINDOW
) -> tuple[KvGroup, ...]:
    """Sorts layers into KV groups: full attention first, then by ascending window.

    A layer that shares another layer's cache is in no group. Layers with equal windows but different head
    shapes are in different groups, so a block is equally large in all layers of a group.

    Raises:
        ConfigurationRefused: if a layer reads another layer's in-place window. The tokens of the step's
            first queries have already slid out when the layer runs.
    """
    layers = list(layers)
    owners = [layer for layer in layers if layer.shares_with is None]
    if window_kind is GroupKind.IN_PLACE_WINDOW:
        sliding = {layer.name for layer in owners if layer.window}
        for layer in layers:
            if layer.shares_with in sliding:
                raise ConfigurationRefused(
                    f"layer {layer.name} reads the KV cache of {layer.shares_with},"
                    " and a shared cache cannot slide in place; use --window-kv paged"
                )

    def key(layer: AttentionLayer) -> tuple[int, int, int, str, bool, bool]:
        return layer.window, layer.num_kv_heads, layer.head_size, str(layer.dtype), layer.latent, layer.alibi

    grouped = itertools.groupby(
        sorted(owners, key=key), key
    )  # sorted is stable: layers keep the model's order
    return tuple(
        KvGroup(group_id, tuple(members), window_kind) for group_id, (_, members) in enumerate(grouped)
    )


@dataclass(frozen=True)
class ShapeConfig:
    """The static sizes of a deployment, which determine the shape of every graph."""

    max_model_len: int
    """Longest sequence (prompt plus output), tokens."""
    max_num_seqs: int
    """Number of slots."""
    chunk: int
    """Tokens in the largest prefill step."""
    block_size: int
    """Tokens in a paged block."""
    decode_buckets: tuple[int, ...]
    """Rows of each decode graph, ascending."""
    num_blocks: tuple[int, ...] = ()
    """Blocks per group, including the null block. Empty: as many as the memory allows."""
    windows_kept_per_slot: int = 0
    """Windows per slot in counted pools, in addition to the slot's own, for prefix hits."""
    prefill_buckets: tuple[int, ...] = ()
    """Chunk sizes, ascending; the last is `chunk`. Empty: `chunk` alone."""

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Tokens of each prefill graph, ascending."""
        return self.prefill_buckets or (self.chunk,)

    @property
    def table_width(self) -> int:
        """Blocks of the longest sequence: the entries in a row of a paged group's block table."""
        return math.ceil(self.max_model_len / self.block_size)

    def check(
        self, groups: Sequence[KvGroup], *, block_size_multiple: int, longest_context: int, stages: int = 1
    ) -> None:
        """Refuses sizes unfit for the device or the model.

        Args:
            groups: the model's KV groups.
            block_size_multiple: the device's block sizes are multiples of this.
            longest_context: tokens of the model's trained context.
            stages: of the pipeline, each with a decode batch of its own.

        Raises:
            ConfigurationRefused: naming the first unfit value and a fitting value.
        """
        graphs = (*self.chunk_sizes, *self.decode_buckets)
        sizes = (self.max_model_len, self.max_num_seqs, self.chunk, self.block_size, *graphs)
        if min(sizes) < 1 or not self.decode_buckets:
            raise ConfigurationRefused(f"every size must be at least 1, got {self}")
        if self.block_size % block_size_multiple:
            raise ConfigurationRefused(
                f"this device does not support block size {self.block_size};"
                f" use a multiple of {block_size_multiple}"
            )
        self._check_chunk_sizes()
        for group in groups:
            group.check_block_size(self.block_size)
        if self.max_model_len > longest_context:
            raise ConfigurationRefused(
                f"max_model_len {self.max_model_len} exceeds the model's context of {longest_context} tokens"
            )
        if list(self.decode_buckets) != sorted(set(self.decode_buckets)):
            raise ConfigurationRefused(f"decode buckets must ascend, got {self.decode_buckets}")
        rows = self.max_num_seqs // stages
        if self.decode_buckets[-1] < rows:
            each = f" // {stages} stages = {rows}" if stages > 1 else ""
            raise ConfigurationRefused(
                f"the largest decode bucket {self.decode_buckets[-1]} is below max_num_seqs"
                f" {self.max_num_seqs}{each}"
            )
        if self.num_blocks and len(self.num_blocks) != len(groups):
            raise ConfigurationRefused(
                f"num_blocks has {len(self.num_blocks)} entries, but the model has {len(groups)} KV groups"
            )
        for group, count in zip(groups, self.num_blocks, strict=False):
            least = 1 + group.blocks_in_use(self)
            if count < least:
                raise ConfigurationRefused(
                    f"{count} blocks of KV group {group.group_id} cannot hold one sequence of"
                    f" {self.max_model_len} tokens; at least {least} are needed"
                )

    def _check_chunk_sizes(self) -> None:
        sizes, chunk, block_size = self.chunk_sizes, self.chunk, self.block_size
        if list(sizes) != sorted({*sizes, chunk}) or sizes[-1] > chunk:
            raise ConfigurationRefused(f"prefill buckets must ascend to the chunk {chunk}, got {sizes}")
        for size in sizes:
            if size % block_size and block_size % size:
                raise ConfigurationRefused(
                    f"chunk {size} and block size {block_size} must divide one another; change either"
                )


@dataclass(frozen=True)
class PoolShapeConfig:
    """The static sizes of a deployment of a pooling model."""

    pool_shapes: tuple[PoolShape, ...]
    """Non-empty."""

    def check(self, *, longest_context: int) -> None:
        """Refuses shapes unfit for the model.

        Raises:
            ConfigurationRefused: naming the first unfit shape and a fitting shape.
        """
        if not self.pool_shapes:
            raise ConfigurationRefused("a pooling model needs at least one shape; set pool_shapes")
        for shape in self.pool_shapes:
            if shape.batch < 1 or not 1 <= shape.prompt_len <= longest_context:
                raise ConfigurationRefused(
                    f"the worker cannot run a shape of {shape.batch} rows of {shape.prompt_len} tokens;"
                    f" use at least 1 row of 1 to {longest_context} tokens"
                )


Shapes = ShapeConfig | PoolShapeConfig
"""The static sizes of any deployment."""

PoolingMethod = Literal["MEAN", "CLS", "LAST", "ALL"]
"""The pooling of a row's hidden states: mean of its real tokens, first, last, or a result for each token."""

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
"""The results of a pooling model's graphs."""

Activation = Literal["normalize", "softmax", "sigmoid"]
"""The last function on a vector: scale it to length 1, or make probabilities of the values of classes."""


@dataclass(frozen=True)
class PoolingDescription:
    """How a pooling model turns a prompt into its result."""

    method: PoolingMethod
    """How to pool."""
    size: int
    """Elements of a vector."""
    task: PoolingTask = "embed"
    """The kind of vectors."""
    activation: Activation | None = "normalize"
    """The values' permitted uses."""
    activates: bool = True
    """Whether that is done unless a request says otherwise."""
    labels: tuple[str, ...] = ()
    """Names of the classes, in the order of the values; empty for embeddings."""
    token_types: bool = False
    """Whether the model tells the two texts of a pair apart by the types of their tokens."""
    dimensions: tuple[int, ...] | None = None
    """The sizes that embeddings may be cut to; empty for any, `None` for none."""

    @property
    def of_tokens(self) -> bool:
        """Whether each token has a result."""
        return self.method == "ALL"


@dataclass(frozen=True)
class ModelSize:
    """The sizes that a model's memory use depends on."""

    weight_bytes: int
    """All parameters and buffers; shared memory counts once."""
    width: int
    """Input plus output sizes of all matrices of the widest layer, in elements; see `memory_budget`."""
    hidden_size: int
    """Elements of a token's state between layers."""
    vocab_size: int
    """Elements of a row of logits; 0 for a pooling model."""
    itemsize: int
    """Bytes of an element of weights and activations."""
    adapter_width: int = 0
    """Elements that a layer's LoRA adapters add to `width` in a step with adapters; 0 if it takes none."""


@dataclass(frozen=True)
class ModelDescription:
    """A model as its configuration describes it."""

    architecture: str
    """For example "LlamaForCausalLM"."""
    vocab_size: int
    """Length of a row of logits."""
    max_model_len: int
    """Tokens of context that the model was trained for."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a sequence, ascending."""
    dtype: torch.dtype
    """Type of weights and activations."""
    quantization: str | None
    """Quantization of the weights, by vLLM's name."""
    layers: tuple[AttentionLayer, ...]
    """Attention layers in the model's order."""
    pooling: PoolingDescription | None
    """Set for a pooling model, without layers to cache."""
    default_sampling: Mapping[str, float]
    """Sampling parameters that the model's authors recommend, by their names in generation_config.json."""
