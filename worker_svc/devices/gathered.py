"""Paged attention in plain PyTorch: gather the blocks, mask, attend.

Correct everywhere and fast nowhere: what a device runs on before it has kernels, and what tests hold kernels against.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from worker_svc.devices.base import AttentionInput, AttentionShape


@dataclass(frozen=True)
class GatheredPlan:
    """A step and the positions of its tokens."""

    step: AttentionInput
    positions: torch.Tensor
    """int64 [rows, query_len]: each token's position in its row's sequence; padding counts on."""

    @classmethod
    def of(cls, step: AttentionInput) -> "GatheredPlan":
        """Derives the positions from a step's lengths."""
        counts = step.query_start[1:] - step.query_start[:-1]
        first = (step.seq_lens - counts).long()
        query_len = step.slot_mapping.shape[0] // step.seq_lens.shape[0]
        return cls(step, first[:, None] + torch.arange(query_len, device=first.device))


def attend(
    shape: AttentionShape,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cache: torch.Tensor,
    plan: GatheredPlan,
    output: torch.Tensor,
) -> None:
    """Like ``Device.attend``, with a cache of shape [blocks, 2, block_size, kv_heads, head_size].

    Raises:
        NotImplementedError: for capped scores.
    """
    if shape.softcap:
        raise NotImplementedError("capped attention scores")
    step, block_size = plan.step, cache.shape[2]
    if shape.writes and key is not None and value is not None:
        blocks, offsets = step.slot_mapping // block_size, step.slot_mapping % block_size
        cache[blocks, 0, offsets] = key
        cache[blocks, 1, offsets] = value
    # Shape: rows, 2, kv_heads, context, head_size.
    context = cache[step.block_table.long()].transpose(1, 2).flatten(2, 3).transpose(2, 3)
    seen = torch.arange(context.shape[3], device=query.device)
    mask = seen <= plan.positions[:, :, None]
    if shape.window:
        mask &= seen > plan.positions[:, :, None] - shape.window
    rows, query_len = plan.positions.shape
    queries = query.view(rows, query_len, shape.num_heads, shape.head_size).transpose(1, 2)
    attended = functional.scaled_dot_product_attention(
        queries, context[:, 0], context[:, 1], attn_mask=mask[:, None],
        scale=shape.scale, enable_gqa=shape.num_heads != shape.num_kv_heads,
    )  # fmt: skip
    output.copy_(attended.transpose(1, 2).reshape(output.shape))
    output[step.num_tokens :] = 0
