"""LoRA adapters of a linear layer, side by side in fixed memory.

A layer adds `B (A x)` of each row's adapter to its product. The A matrices of all adapter slots lie side by
side, and so do the B matrices. A step's graph computes with all of them at once, so it serves any mix of
adapters. In plain operators, a mask with a row per token keeps the columns of its own adapter.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

MOST_PARTS = 4
"""The most parts of a layer that kernels serve."""
NO_ADAPTER = -1
"""Stands for an adapter slot in rows that run the base model."""


@dataclass(frozen=True)
class StackShape:
    """The sizes of a layer's adapters on this rank."""

    in_size: int
    """Inputs of the layer."""
    out_sizes: tuple[int, ...]
    """Outputs of each part of the layer with matrices of its own, for example queries, keys and values."""
    max_loras: int
    """Adapter slots."""
    rank: int
    """Rows of an A matrix; adapters of a lower rank are filled up with zeros."""
    dtype: torch.dtype
    """The type of the matrices."""
    activations: torch.dtype
    """The type of the layer's inputs and outputs."""

    @property
    def columns(self) -> int:
        """Columns of the mask: the adapters of a part."""
        return self.max_loras * self.rank


LayerWeights = Sequence[tuple[torch.Tensor, torch.Tensor] | None]
"""An adapter's matrices A [rank, in] and B [out, rank] for each part of a layer, B already scaled. `None`
stands for a part that it leaves alone. The rank is at most the stack's."""


class LoraStack:
    """A layer's adapters in plain operators, for any device and compiler."""

    def __init__(self, shape: StackShape, a: torch.Tensor, b: torch.Tensor) -> None:
        """Takes over zeroed memory; see `sizes`."""
        self._shape = shape
        self._a = a
        self._b = b

    @classmethod
    def num_bytes(cls, shape: StackShape) -> int:
        """Returns the memory of a stack."""
        return sum(map(math.prod, cls.sizes(shape))) * shape.dtype.itemsize

    @staticmethod
    def sizes(shape: StackShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of the two tensors: [parts * slots * rank, in] and [out, parts * slots * rank].

        B is zero outside the columns of each output's own part, so a single product serves all parts.
        """
        columns = len(shape.out_sizes) * shape.columns
        return (columns, shape.in_size), (sum(shape.out_sizes), columns)

    def write(self, slot: int, weights: LayerWeights) -> None:
        """Replaces the adapter in a slot; without weights for a part, the part's are zeros."""
        shape, first_out = self._shape, 0
        for part, (size, matrices) in enumerate(zip(shape.out_sizes, weights, strict=True)):
            first = part * shape.columns + slot * shape.rank
            a, b = self._padded(size, matrices)
            self._a[first : first + shape.rank].copy_(a)
            self._b[first_out : first_out + size, first : first + shape.rank].copy_(b)
            first_out += size

    def _padded(
        self, size: int, matrices: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a part's A [stack's rank, in] and B [size, stack's rank], filled up with zeros."""
        shape = self._shape
        a = torch.zeros((shape.rank, shape.in_size), dtype=shape.dtype)
        b = torch.zeros((size, shape.rank), dtype=shape.dtype)
        if matrices is not None:
            rank = matrices[0].shape[0]
            a[:rank], b[:, :rank] = matrices
        return a, b

    def join(self, weight: torch.nn.Parameter) -> None:
        """Takes the layer's own weights [out, in] along, if that makes steps with adapters faster.

        Called at most once, for a layer with a plain product of these weights.
        """

    def apply(
        self,
        product: Callable[[], torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,  # noqa: ARG002 - for stacks that have joined the weights
        selection: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the layer's outputs with those of the rows' adapters, [tokens, out].

        `product` computes the layer's own outputs of `x` [tokens, in], the bias included.
        """
        return self.add(product(), x, selection)

    def add(self, out: torch.Tensor, x: torch.Tensor, selection: torch.Tensor) -> torch.Tensor:
        """Adds the rows' adapters' outputs for `x` [tokens, in] to `out` [tokens, out], possibly in place."""
        parts = len(self._shape.out_sizes)
        inner = functional.linear(x.to(self._shape.dtype), self._a)
        by_part = inner.view(-1, parts, self._shape.columns)
        # Another row's adapter may overflow, and 0 times infinity is NaN.
        chosen = by_part.masked_fill(selection.unsqueeze(1) == 0, 0).view(inner.shape)
        return out + functional.linear(chosen, self._b).to(out.dtype)


def mask_of(slots: torch.Tensor, shape: StackShape) -> torch.Tensor:
    """Returns which columns of the A matrices each row takes, 0 or 1, [tokens, slots * rank].

    Args:
        slots: the rows' adapter slots, int32 [tokens]; `NO_ADAPTER` for the base model.
        shape: of any layer.
    """
    owners = torch.arange(shape.columns, dtype=slots.dtype, device=slots.device) // shape.rank
    return (slots.unsqueeze(1) == owners).to(shape.dtype)
