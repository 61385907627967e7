"""Shapes: what a model needs of the KV cache, and the static sizes that a deployment runs with."""

import enum
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from protos.errors import ConfigurationRefused

# Padded rows and padded chunk tokens read and write this block of every group; it is never allocated.
NULL_BLOCK = 0


class GroupKind(enum.Enum):
    """How a group of layers uses KV memory."""

    FULL = "full"
    """Every token is kept, in paged blocks."""
    PAGED_WINDOW = "paged_window"
    """Append-only paged blocks; those behind the window may be freed."""


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

    @property
    def window(self) -> int:
        """Tokens that a query attends to; 0 for all."""
        return self.layers[0].window

    @property
    def kind(self) -> GroupKind:
        """How the group uses KV memory."""
        return GroupKind.PAGED_WINDOW if self.window else GroupKind.FULL

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all of the group's layers."""
        return sum(layer.bytes_per_token for layer in self.layers)

    def blocks_per_sequence(self, geometry: "Geometry") -> int:
        """Blocks that one sequence of the longest length holds.

        The same for windows: this release's scheduler keeps the blocks behind them, so a pool sized for less would run dry.
        """
        return geometry.table_width


def group_layers(layers: Iterable[AttentionLayer]) -> tuple[KvGroup, ...]:
    """Sorts layers into KV groups, full attention first, then by ascending window; layers that share a cache have none.

    Layers of one window but of different head shapes get different groups, so that a block has the same number of bytes in each
    of a group's layers.
    """
    owners = [layer for layer in layers if layer.shares_with is None]

    def key(layer: AttentionLayer) -> tuple[int, int, int, str]:
        return layer.window, layer.num_kv_heads, layer.head_size, str(layer.dtype)

    grouped = itertools.groupby(sorted(owners, key=key), key)  # stable: layers keep the model's order
    return tuple(KvGroup(group_id, tuple(members)) for group_id, (_, members) in enumerate(grouped))


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
    """Tokens of a block, in every group."""
    decode_buckets: tuple[int, ...]
    """Rows of the decode graphs, ascending."""
    num_blocks: tuple[int, ...] = ()
    """Blocks per group including the null block; empty: as many as the memory allows."""

    @property
    def table_width(self) -> int:
        """Entries of a block table's row."""
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
            least = 1 + group.blocks_per_sequence(self)
            if count < least:
                raise ConfigurationRefused(
                    f"{count} blocks of KV group {group.group_id} cannot hold one sequence of {self.max_model_len} tokens;"
                    f" at least {least} are needed"
                )
