"""What becomes of a pooling model's hidden states: one vector a row."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

Method = Literal["MEAN", "CLS", "LAST"]
"""Of a row's hidden states: their mean over the real tokens, the first one's, or the last real one's."""


@dataclass(frozen=True)
class PoolingDescription:
    """What a pooling model makes of a prompt."""

    method: Method
    normalize: bool
    """Whether its authors scale embeddings to length 1."""
    size: int
    """Elements of one embedding."""


def pool_rows(hidden: torch.Tensor, lengths: torch.Tensor, method: Method) -> torch.Tensor:
    """Pools the real tokens of each row; what padding holds, NaN included, changes nothing.

    Args:
        hidden: [rows, row_len, hidden].
        lengths: int64 [rows]: leading tokens of each row that are real, at least 1.
        method: how.

    Returns:
        float32 [rows, hidden].
    """
    match method:
        case "CLS":
            return hidden[:, 0].float()
        case "LAST":
            return hidden[torch.arange(len(lengths), device=hidden.device), lengths - 1].float()
        case "MEAN":
            padding = torch.arange(hidden.shape[1], device=hidden.device) >= lengths[:, None]
            total = hidden.float().masked_fill(padding[:, :, None], 0).sum(dim=1)
            return total / lengths[:, None]


def to_length_one(vectors: torch.Tensor) -> torch.Tensor:
    """Each row scaled to Euclidean length 1."""
    return functional.normalize(vectors, p=2, dim=-1)
