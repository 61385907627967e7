"""The static shapes of a generating deployment, and the rules between them."""

from collections.abc import Sequence
from dataclasses import dataclass

from protos.errors import ConfigurationRefused
from protos.steps import GroupKind


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share a block table."""

    kind: GroupKind
    """How blocks are used."""
    window: int = 0
    """Tokens that a query attends to, itself included; 0 for full attention."""


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The limits of a worker's device and model (``Worker.Describe``)."""

    max_context: int
    """Longest context of the model, tokens."""
    block_size_multiple: int
    """The block size must be a multiple of this many tokens."""
    max_batch: int
    """Most rows of a decode step."""
    max_chunk: int
    """Most tokens of a prefill step."""


@dataclass(frozen=True, slots=True)
class ShapeConfig:
    """A deployment's static shapes."""

    max_model_len: int
    """Longest sequence (prompt plus output), tokens."""
    max_num_seqs: int
    """Slots of a replica."""
    chunk: int
    """Tokens of a prefill step."""
    block_size: int
    """Tokens of a KV block of a paged group; a block of an in-place group holds a window."""
    buckets: tuple[int, ...]
    """Decode batch sizes, ascending."""
    stages: int = 1
    """Pipeline stages of a replica."""

    @property
    def stage_batch(self) -> int:
        """Most rows of a decode step."""
        return self.max_num_seqs // self.stages

    @property
    def hash_block_size(self) -> int:
        """Tokens per prefix key: the smaller of chunk and block size, which divides the larger."""
        return min(self.chunk, self.block_size)

    def check(self, limits: DeviceLimits, groups: Sequence[KvGroup]) -> None:
        """Checks the shapes against each other, the model and the device.

        Raises:
            ConfigurationRefused: naming the first broken rule and the setting to change.
        """
        per_stage = f" // {self.stages} pipeline stages" if self.stages > 1 else ""
        rules = [
            (self.max_model_len <= limits.max_context,
             f"max_model_len {self.max_model_len} exceeds the model's context of {limits.max_context} tokens"),
            (self.block_size % limits.block_size_multiple == 0,
             f"block_size {self.block_size} must be a multiple of {limits.block_size_multiple} on this device"),
            (self.block_size % self.chunk == 0 or self.chunk % self.block_size == 0,
             f"max_num_batched_tokens {self.chunk} (the prefill chunk) and block_size {self.block_size} must divide one another"),
            (self.chunk <= limits.max_chunk,
             f"max_num_batched_tokens {self.chunk} (the prefill chunk) exceeds this device's limit of {limits.max_chunk}"),
            (self.stage_batch <= limits.max_batch,
             f"max_num_seqs {self.max_num_seqs}{per_stage} exceeds this device's limit of {limits.max_batch}"),
            (self.buckets[-1] >= self.stage_batch,
             f"the largest decode bucket {self.buckets[-1]} is smaller than max_num_seqs {self.max_num_seqs}{per_stage}"),
            (len(groups) > 0, "the worker describes no KV groups; it cannot generate text"),
        ]  # fmt: skip
        for group_id, group in enumerate(groups):
            name = f"KV group {group_id} ({group.kind.value.replace('_', ' ')}, window {group.window})"
            if group.kind is GroupKind.FULL:
                rules.append((group.window == 0, f"{name}: full attention has no window"))
                continue
            rules.append((group.window >= 1, f"{name}: a window must be at least 1 token"))
            if group.kind is GroupKind.IN_PLACE_WINDOW:
                rules += [
                    (group.window <= self.block_size,
                     f"{name}: block_size {self.block_size} is smaller than the window; use a multiple of {group.window}"),
                    (group.window < 1 or self.block_size % group.window == 0,
                     f"{name}: block_size {self.block_size} must be a multiple of the window"),
                ]  # fmt: skip
        for holds, broken in rules:
            if not holds:
                raise ConfigurationRefused(broken)
