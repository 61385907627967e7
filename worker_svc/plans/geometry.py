"""Shapes: what a model needs of the KV cache, and the static sizes that a deployment runs with."""

import enum
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from protos.errors import ConfigurationRefused
from protos.steps import PoolShape

# Padded rows and padded chunk tokens read and write this block of every group; it is never allocated.
NULL_BLOCK = 0


class GroupKind(enum.Enum):
    """How a group of layers uses KV memory."""

    FULL = "full"
    """Every token is kept, in paged blocks."""
    PAGED_WINDOW = "paged_window"
    """Append-only paged blocks; those behind the window may be freed."""
    IN_PLACE_WINDOW = "in_place_window"
    """One block a request, which holds exactly a window: its last tokens, oldest first from offset 0. They slide with every step."""


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of a model."""

    name: str
    """Unique in the model, for example "model.layers.0.self_attn.attn"."""
    num_heads: int
    """Query heads on this rank."""
    num_kv_heads: int
    """Key and value heads on this rank."""
    head_size: int
    """Elements of one head's key or value."""
    window: int
    """Tokens a query attends to, itself included; 0 for all."""
    dtype: torch.dtype
    """Element type of keys and values in the cache."""
    shares_with: str | None = None
    """Another layer whose cache this one reads instead of having its own."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's key and value take in this layer's cache."""
        return 2 * self.num_kv_heads * self.head_size * self.dtype.itemsize


@dataclass(frozen=True)
class KvGroup:
    """Layers that share a block table: equal window, equal shapes."""

    group_id: int
    """Index in every list of groups; 0-based and dense."""
    layers: tuple[AttentionLayer, ...]
    """In the model's order; never empty."""
    window_kind: GroupKind = GroupKind.PAGED_WINDOW
    """How memory is used if the layers have a window; meaningless without one."""

    @property
    def window(self) -> int:
        """Tokens that a query attends to; 0 for all."""
        return self.layers[0].window

    @property
    def kind(self) -> GroupKind:
        """How the group uses KV memory."""
        return self.window_kind if self.window else GroupKind.FULL

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all of the group's layers."""
        return sum(layer.bytes_per_token for layer in self.layers)

    def tokens_per_block(self, block_size: int) -> int:
        """Tokens that a block of this group holds where paged blocks hold ``block_size``."""
        return self.window if self.kind is GroupKind.IN_PLACE_WINDOW else block_size

    def table_width(self, geometry: "Geometry") -> int:
        """Entries of a row of the group's block table."""
        return 1 if self.kind is GroupKind.IN_PLACE_WINDOW else geometry.table_width

    def blocks_in_use(self, geometry: "Geometry") -> int:
        """Blocks that one sequence of the longest length must hold at a time, so that it can run at all.

        A paged window needs those that the first query of a chunk sees and those that the chunk fills; neither ends of them need
        lie on a block's edge.
        """
        match self.kind:
            case GroupKind.FULL:
                return geometry.table_width
            case GroupKind.PAGED_WINDOW:
                span = self.window - 1 + geometry.chunk
                return min(geometry.table_width, math.ceil(span / geometry.block_size) + 1)
            case GroupKind.IN_PLACE_WINDOW:
                return 1

    def blocks_per_sequence(self, geometry: "Geometry") -> int:
        """Blocks that a pool has for each sequence of the longest length, what is kept to resume prefixes from included."""
        in_use, kept = self.blocks_in_use(geometry), geometry.windows_kept_per_slot
        match self.kind:
            case GroupKind.FULL:
                return in_use
            case GroupKind.PAGED_WINDOW:
                per_window = math.ceil(self.window / geometry.block_size) + 1
                return min(geometry.table_width, in_use + kept * per_window)
            case GroupKind.IN_PLACE_WINDOW:
                return in_use + kept

    def check_block_size(self, block_size: int) -> None:
        """Refuses a size of paged blocks of which a window that slides in place cannot be a part.

        Raises:
            ConfigurationRefused: naming the window.
        """
        if self.kind is not GroupKind.IN_PLACE_WINDOW:
            return
        if self.window > block_size:
            raise ConfigurationRefused(
                f"a window of {self.window} tokens that slides in place needs a block size of at least as many, got {block_size};"
                " raise --block-size or use --window-kv paged"
            )
        if block_size % self.window:
            raise ConfigurationRefused(
                f"block size {block_size} is no multiple of the window of {self.window} tokens that slides in place;"
                " change --block-size or use --window-kv paged"
            )


def group_layers(
    layers: Iterable[AttentionLayer], window_kind: GroupKind = GroupKind.PAGED_WINDOW
) -> tuple[KvGroup, ...]:
    """Sorts layers into KV groups, full attention first, then by ascending window; layers that share a cache have none.

    Layers of one window but of different head shapes get different groups, so that a block has the same number of bytes in each
    of a group's layers.

    Args:
        layers: the model's.
        window_kind: how groups with a window use KV memory.

    Raises:
        ConfigurationRefused: if a layer reads another's cache that slides in place: what the step's first tokens have to see is gone
            from there by the time the layer runs.
    """
    layers = list(layers)
    owners = [layer for layer in layers if layer.shares_with is None]
    if window_kind is GroupKind.IN_PLACE_WINDOW:
        sliding = {layer.name for layer in owners if layer.window}
        for layer in layers:
            if layer.shares_with in sliding:
                raise ConfigurationRefused(
                    f"layer {layer.name} reads the KV cache of {layer.shares_with}, which cannot slide in place then;"
                    " use --window-kv paged"
                )

    def key(layer: AttentionLayer) -> tuple[int, int, int, str]:
        return layer.window, layer.num_kv_heads, layer.head_size, str(layer.dtype)

    grouped = itertools.groupby(sorted(owners, key=key), key)  # stable: layers keep the model's order
    return tuple(
        KvGroup(group_id, tuple(members), window_kind) for group_id, (_, members) in enumerate(grouped)
    )


@dataclass(frozen=True)
class Geometry:
    """The static sizes of a deployment; every graph's shape follows from them."""

    max_model_len: int
    """Longest sequence (prompt plus output), tokens."""
    max_num_seqs: int
    """Slots."""
    chunk: int
    """Tokens of a prefill step."""
    block_size: int
    """Tokens of a block in every group but those whose window slides in place."""
    decode_buckets: tuple[int, ...]
    """Rows of the decode graphs, ascending."""
    num_blocks: tuple[int, ...] = ()
    """Blocks per group including the null block; empty: as many as the memory allows."""
    windows_kept_per_slot: int = 0
    """Contents of a window for which counted pools have room beside each slot's own, to resume prefixes from."""

    @property
    def table_width(self) -> int:
        """Blocks of the longest sequence, and so entries of a row of a paged group's block table."""
        return math.ceil(self.max_model_len / self.block_size)

    def check(self, groups: Sequence[KvGroup], *, block_size_multiple: int, longest_context: int) -> None:
        """Refuses sizes that the device or the model cannot run.

        Args:
            groups: the model's KV groups.
            block_size_multiple: what the device's kernels ask of a block size.
            longest_context: tokens that the model was made for.

        Raises:
            ConfigurationRefused: naming the first value that does not fit and what would.
        """
        sizes = (self.max_model_len, self.max_num_seqs, self.chunk, self.block_size, *self.decode_buckets)
        if min(sizes) < 1 or not self.decode_buckets:
            raise ConfigurationRefused(f"every size must be at least 1, got {self}")
        if self.block_size % block_size_multiple:
            raise ConfigurationRefused(
                f"block size {self.block_size} does not suit this device; use a multiple of {block_size_multiple}"
            )
        if self.chunk % self.block_size and self.block_size % self.chunk:
            raise ConfigurationRefused(
                f"chunk {self.chunk} and block size {self.block_size} must divide one another; change either"
            )
        for group in groups:
            group.check_block_size(self.block_size)
        if self.max_model_len > longest_context:
            raise ConfigurationRefused(
                f"max_model_len {self.max_model_len} exceeds the model's context of {longest_context} tokens"
            )
        if list(self.decode_buckets) != sorted(set(self.decode_buckets)):
            raise ConfigurationRefused(f"decode buckets must ascend, got {self.decode_buckets}")
        if self.decode_buckets[-1] < self.max_num_seqs:
            raise ConfigurationRefused(
                f"the largest decode bucket {self.decode_buckets[-1]} is below max_num_seqs {self.max_num_seqs}"
            )
        if self.num_blocks and len(self.num_blocks) != len(groups):
            raise ConfigurationRefused(
                f"num_blocks names {len(self.num_blocks)} groups, the model has {len(groups)}"
            )
        for group, count in zip(groups, self.num_blocks, strict=False):
            least = 1 + group.blocks_in_use(self)
            if count < least:
                raise ConfigurationRefused(
                    f"{count} blocks of KV group {group.group_id} cannot hold one sequence of {self.max_model_len} tokens;"
                    f" at least {least} are needed"
                )


@dataclass(frozen=True)
class PoolGeometry:
    """The static sizes of a deployment of a pooling model."""

    shapes: tuple[PoolShape, ...]
    """At least one."""

    def check(self, *, longest_context: int) -> None:
        """Refuses shapes that the model cannot run.

        Raises:
            ConfigurationRefused: naming the first shape that does not fit and what would.
        """
        if not self.shapes:
            raise ConfigurationRefused("a pooling model needs at least one shape of so many rows and tokens")
        for shape in self.shapes:
            if shape.batch < 1 or not 1 <= shape.prompt_len <= longest_context:
                raise ConfigurationRefused(
                    f"a shape of {shape.batch} rows of {shape.prompt_len} tokens cannot be run;"
                    f" use at least 1 row of 1 to {longest_context} tokens"
                )
