"""Pools a row's hidden states, and applies the activation of the results."""

import torch
from torch.nn import functional

from worker_svc.shapes.model_description import Activation, PoolingMethod


def pool_rows(hidden: torch.Tensor, lengths: torch.Tensor, method: PoolingMethod) -> torch.Tensor:
    """Pools the real tokens of each row. The contents of padding, NaN included, have no effect.

    Args:
        hidden: [rows, row_len, hidden].
        lengths: int64 [rows], the number of real tokens at the start of each row, at least 1.
        method: how to pool.

    Returns:
        float32 [rows, hidden], or [rows, row_len, hidden] for all tokens.
    """
    match method:
        case "CLS":
            return hidden[:, 0].float()
        case "LAST":
            # PyTorch marks indexing as an operator with data-dependent shapes, which a graph cannot contain.
            last = (lengths - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
            return hidden.gather(1, last)[:, 0].float()
        case "MEAN":
            padding = torch.arange(hidden.shape[1], device=hidden.device) >= lengths[:, None]
            total = hidden.float().masked_fill(padding[:, :, None], 0).sum(dim=1)
            return total / lengths[:, None]
        case "ALL":
            return hidden.float()


def pool_packed(
    hidden: torch.Tensor, places: torch.Tensor, text_of: torch.Tensor, method: PoolingMethod
) -> torch.Tensor:
    """Pools texts that follow one another. The contents of padding have no effect.

    Args:
        hidden: [tokens, hidden].
        places: int64 [3, texts]; see `RecordableModel`.
        text_of: int64 [tokens], each token's text; for padding the number of texts.
        method: how to pool.

    Returns:
        float32 [texts, hidden], or [tokens, hidden] for all tokens. Texts without tokens mean nothing.
    """
    lengths, starts = places[0], places[2]
    match method:
        case "CLS":
            return hidden.index_select(0, starts.clamp(max=hidden.shape[0] - 1)).float()
        case "LAST":
            return hidden.index_select(0, (starts + lengths - 1).clamp(min=0)).float()
        case "MEAN":
            # The last sum is that of padding.
            empty = torch.zeros(
                (lengths.shape[0] + 1, hidden.shape[1]), dtype=torch.float32, device=hidden.device
            )
            total = empty.index_add(0, text_of, hidden.float())[:-1]
            return total / lengths.clamp(min=1)[:, None]
        case "ALL":
            return hidden.float()


def activate(vectors: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Applies the activation along the last dimension of float32 vectors [..., size]."""
    match activation:
        case "normalize":
            return functional.normalize(vectors, p=2, dim=-1)
        case "softmax":
            return functional.softmax(vectors, dim=-1)
        case "sigmoid":
            return torch.sigmoid(vectors)
