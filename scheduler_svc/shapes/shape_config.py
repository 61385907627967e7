"""The static shapes of generating and of pooling deployments, and their rules."""

from collections.abc import Sequence
from dataclasses import dataclass

from protos.errors import ConfigurationRefused
from protos.steps import GroupKind, PoolShape


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
    prefill_buckets: tuple[int, ...] = ()
    """Chunk sizes, ascending; the last is `chunk`. Empty: `chunk` alone."""

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Tokens of each prefill graph, ascending."""
        return self.prefill_buckets or (self.chunk,)

    @property
    def stage_batch(self) -> int:
        """Most rows of a decode step."""
        return self.max_num_seqs // self.stages

    def check(self, limits: DeviceLimits, groups: Sequence[KvGroup]) -> None:
        """Checks the shapes against each other, the model and the device; refuses the first broken rule."""
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


# The default shapes: prompt lengths grow by _FACTOR from the shortest up to the model's context. For each
# length, batches grow by the same factor as long as they hold at most _TOKENS_PER_BATCH tokens.
_FACTOR = 4
_SHORTEST_PROMPT = 64
_TOKENS_PER_BATCH = 1024
# Packed shapes: up to each of these numbers of tokens they grow by a step, so that little of one is padding.
# From PACKED_TOKENS on they double, because only longer texts need them.
_PACKED_STEPS = ((64, 8), (128, 16), (256, 32), (512, 64))
PACKED_TOKENS = _PACKED_STEPS[-1][0]
"""Texts fill packed shapes up to this many tokens, because a CPU gains nothing from longer steps."""
_TOKENS_PER_TEXT, _MOST_TEXTS = 4, 64


def default_shapes(
    max_context: int, max_batch: int, max_tokens: int | None = None, *, packs_texts: bool = False
) -> tuple[PoolShape, ...]:
    """Returns shapes for every prompt of a model, for example 1x64, 4x64, 16x64, 1x256, 4x256.

    For the arguments see `shapes_of`.
    """
    longest = max_context if max_tokens is None else min(max_context, max_tokens)
    if packs_texts:
        return tuple(
            PoolShape(size, max(1, min(max_batch, _MOST_TEXTS, size // _TOKENS_PER_TEXT)), packed=True)
            for size in _packed_sizes(longest)
        )
    lengths = []
    length = _SHORTEST_PROMPT
    while length < longest:
        lengths.append(length)
        length *= _FACTOR
    shapes = []
    for prompt_len in [*lengths, longest]:
        batch = 1
        while batch == 1 or (
            batch <= max_batch
            and batch * prompt_len <= min(_TOKENS_PER_BATCH, max_tokens or _TOKENS_PER_BATCH)
        ):
            shapes.append(PoolShape(prompt_len, batch))
            batch *= _FACTOR
    return tuple(shapes)


def _packed_sizes(longest: int) -> list[int]:
    sizes = []
    size = 0
    for limit, step in _PACKED_STEPS:
        while size < limit:
            size += step
            sizes.append(size)
    while size < longest:
        size *= 2
        sizes.append(size)
    return [*(each for each in sizes if each < longest), longest]


def shapes_of(
    batch_sizes: Sequence[int],
    prompt_lens: Sequence[int],
    *,
    max_context: int,
    max_batch: int,
    max_tokens: int | None = None,
    packs_texts: bool = False,
    fixed: Sequence[PoolShape] = (),
) -> tuple[PoolShape, ...]:
    """Returns the shapes of the settings, ascending, or the default shapes if the settings name none.

    Args:
        batch_sizes: rows of each shape.
        prompt_lens: tokens per row of each shape, in the same order.
        max_context: the model's longest prompt, tokens.
        max_batch: the device's largest batch, rows.
        max_tokens: most tokens of a batch whose results fit into a message; `None` if any do.
        packs_texts: whether the device runs packed shapes, which then are the default.
        fixed: the shapes of other replicas, which replace those of the settings.
    """
    named = {PoolShape(length, batch) for batch, length in zip(batch_sizes, prompt_lens, strict=True)}
    shapes = tuple(sorted(fixed or named))
    for shape in shapes:
        if shape.packed and not packs_texts:
            raise ConfigurationRefused(
                "this device runs no packed shapes, which the other workers run; set pool_batch_sizes and"
                " pool_prompt_lens"
            )
        if shape.prompt_len > max_context:
            raise ConfigurationRefused(
                f"pool_prompt_lens: {shape.prompt_len} exceeds the model's context of {max_context} tokens"
            )
        if shape.batch > max_batch:
            raise ConfigurationRefused(
                f"pool_batch_sizes: {shape.batch} exceeds this device's limit of {max_batch} rows"
            )
        if max_tokens is not None and shape.num_tokens > max_tokens:
            raise ConfigurationRefused(
                f"pool_batch_sizes, pool_prompt_lens: results of {shape} tokens are too large for a message; a shape"
                f" may have {max_tokens} tokens"
            )
    return shapes or default_shapes(max_context, max_batch, max_tokens, packs_texts=packs_texts)
