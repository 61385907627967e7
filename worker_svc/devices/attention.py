"""Arguments of attention kernels: a layer's parameters, a call's tensors, a step's places in the cache."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch


@dataclass(frozen=True)
class AttentionParams:
    """The constants of a layer's attention."""

    num_heads: int
    """Query heads on this rank."""
    num_kv_heads: int
    """Key and value heads on this rank."""
    head_size: int
    """Elements of a head's query, key or value."""
    scale: float
    """Factor on the scores before the softmax."""
    window: int
    """Tokens that a query attends to, itself included; 0 for all. Without causality as many on each side."""
    softcap: float
    """Scores become `softcap * tanh(scores / softcap)`; 0 turns this off."""
    writes: bool
    """False if the layer reads another layer's cache and writes nothing."""
    causal: bool = True
    """Whether a token sees only itself and earlier tokens."""
    sinks: bool = False
    """Whether each head adds a learned score to the softmax's denominator, as in gpt-oss. Each call brings
    the scores."""
    latent: int = 0
    """Elements of a latent vector (MLA): the leading part of each key, which is also its value. There is one
    key head. 0 if values are stored separately."""
    slopes: tuple[float, ...] = ()
    """For each query head, the loss of score per token of distance (ALiBi). Empty: none."""


@dataclass(frozen=True)
class AttentionCall:
    """A call of a layer's attention. The device's plan holds everything that changes between steps."""

    params: AttentionParams
    """The layer's constants."""
    query: torch.Tensor
    """[tokens, heads, head_size]."""
    key: torch.Tensor | None
    """[tokens, kv_heads, head_size]; unused if the layer reads another layer's cache."""
    value: torch.Tensor | None
    """Like `key`; `None` if the values are parts of the keys."""
    cache: torch.Tensor
    """The layer's cache, of the shape that `Device.cache_shape` returns."""
    output: torch.Tensor
    """[tokens, heads, head_size], or [tokens, heads, latent]; the call writes it in place."""
    sinks: torch.Tensor | None = None
    """float32 [heads]: the score of an extra position without a value; `None` for a layer without
    sinks."""

    @property
    def new_states(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The key and the value that the call writes to the cache; `None` if it writes nothing."""
        if not self.params.writes or self.key is None or self.value is None:
            return None
        return self.key, self.value


@dataclass(frozen=True)
class PagedInput:
    """A step's places in the paged cache of a KV group, and the visible tokens."""

    seq_lens: torch.Tensor
    """int32 [rows]: tokens of each row's sequence, including this step's tokens. Padded rows: 1."""
    query_start: torch.Tensor
    """int32 [rows + 1]: index of each row's first real token in the step; the last entry is the number of
    real tokens."""
    block_table: torch.Tensor
    """int32 [rows, width]: block ids in the order of positions. Unused entries and padded rows: the null
    block."""
    slot_mapping: torch.Tensor
    """int64 [tokens]: `block * block_size + offset` where each token is written. Padding: in the null
    block."""
    num_tokens: int
    """Leading tokens that attend. The rest of a chunk is padding and gets zeros."""


@dataclass(frozen=True)
class InPlaceInput:
    """The same for a window that slides in place. Names and shapes follow the NPU's kernels.

    A row's block holds the last `window` tokens of its sequence, oldest first from offset 0, or all of them
    while they are fewer. A step appends its keys and values, attends, and keeps the last `window` tokens of
    the result.
    """

    cache_seq_len: torch.Tensor
    """int32 [rows, 1]: tokens in each row's block when the step starts. Padded rows: 0."""
    cache_offset: torch.Tensor
    """int32 [rows, 1]: `cache_seq_len` plus the row's real tokens in this step. Padded rows: 1."""
    block_table: torch.Tensor
    """int32 [rows, 1]: each row's block. Padded rows: the null block."""
    query_len: int
    """Tokens of each row in this step, padding included: the chunk, or 1."""


StepInput = PagedInput | InPlaceInput
"""Input of a step that uses the KV cache, by the kind of its group."""


@dataclass(frozen=True)
class RowsPlan:
    """Visible tokens of whole prompts, a prompt per row, for pooling models; nothing is cached."""

    mask: torch.Tensor
    """[rows, 1, queries, row_len], bool or, on NPUs, float32 to add to the scores. A single query if all
    tokens of a row see the same."""

    @classmethod
    def of(cls, lengths: torch.Tensor, row_len: int, params: AttentionParams) -> "RowsPlan":
        """Builds the mask of layers with these parameters.

        No real token sees padding, and every token sees something: a softmax over nothing is NaN.

        Args:
            lengths: int64 [rows], the number of real tokens at the start of each row, at least 1.
            row_len: tokens of a row, padding included.
            params: says whether the layers are causal and how far they look back.
        """
        seen = torch.arange(row_len, device=lengths.device)
        mask = (seen < lengths[:, None])[:, None, None, :]
        if params.causal or params.window:
            behind = seen[:, None] - seen
            visible = behind >= 0 if params.causal else torch.ones_like(behind, dtype=torch.bool)
            if params.window:
                visible &= behind.abs() < params.window
            # Padding beyond a window sees itself.
            mask = (mask & visible) | torch.eye(row_len, dtype=torch.bool, device=lengths.device)
        return cls(mask)


# Texts of at most so many tokens are padded to it, longer ones to the next power of two. Texts of one padded
# length attend side by side.
_SHORT_TEXT = 32


@dataclass(frozen=True)
class PackedGroup:
    """Texts of similar length in a packed step. They attend as padded rows."""

    sources: torch.Tensor
    """int64 [rows * row_len]: the step's token in each place of the rows; any token for padding."""
    real: torch.Tensor
    """int64 [tokens]: the places of real tokens."""
    targets: torch.Tensor
    """int64 [tokens]: the step's tokens in these places."""
    rows: RowsPlan
    """Visible places."""


@dataclass(frozen=True)
class PackedPlan:
    """Visible tokens of consecutive texts: each sees its own text. Nothing is cached."""

    num_tokens: int
    """Real tokens; padding follows them."""
    groups: tuple[PackedGroup, ...]
    """All texts. The length of a text's group follows from its own, independent of the others."""

    @classmethod
    def of(cls, lengths: torch.Tensor, params: AttentionParams) -> "PackedPlan":
        """Groups the texts of a step.

        Args:
            lengths: int64 [texts], tokens of each text in order; 0 for none.
            params: says whether the layers are causal and how far they look back.
        """
        starts = lengths.cumsum(0) - lengths
        by_len: dict[int, list[int]] = {}
        for text, length in enumerate(lengths.tolist()):
            if length:
                by_len.setdefault(max(_SHORT_TEXT, 1 << (length - 1).bit_length()), []).append(text)
        groups = []
        for row_len, texts in by_len.items():
            inside = torch.arange(row_len) < lengths[texts, None]
            sources = torch.where(inside, starts[texts, None] + torch.arange(row_len), 0).flatten()
            (real,) = inside.flatten().nonzero(as_tuple=True)
            rows = RowsPlan.of(lengths[texts], row_len, params)
            groups.append(PackedGroup(sources, real, sources[real], rows))
        return cls(int(lengths.sum()), tuple(groups))


def tensors_of(step: StepInput) -> list[torch.Tensor]:
    """Returns the input's tensors, in the order of its fields."""
    values = (getattr(step, each.name) for each in fields(step))
    return [value for value in values if isinstance(value, torch.Tensor)]


def with_tensors(step: StepInput, tensors: Iterator[torch.Tensor]) -> StepInput:
    """Copies the input with other tensors, in the order of `tensors_of`."""
    names = [each.name for each in fields(step) if isinstance(getattr(step, each.name), torch.Tensor)]
    replaced: dict[str, Any] = {name: next(tensors) for name in names}
    return replace(step, **replaced)
