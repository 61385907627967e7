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
    sinks: torch.Tensor | None = None,
) -> None:
    """Like ``Device.attend``, with a cache of shape [blocks, 2, block_size, kv_heads, head_size]."""
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
    # What no real token of a row sees may be another request's by now, and NaN times 0 is NaN.
    unseen = ~(mask & (plan.positions < step.seq_lens[:, None])[:, :, None]).any(dim=1)
    context = context.masked_fill(unseen[:, None, None, :, None], 0)
    rows, query_len = plan.positions.shape
    queries = query.view(rows, query_len, shape.num_heads, shape.head_size).transpose(1, 2)
    if shape.softcap or sinks is not None:
        attended = attention(shape, queries, context, mask, sinks)
    else:
        attended = functional.scaled_dot_product_attention(
            queries, context[:, 0], context[:, 1], attn_mask=mask[:, None],
            scale=shape.scale, enable_gqa=shape.num_heads != shape.num_kv_heads,
        )  # fmt: skip
    output.copy_(attended.transpose(1, 2).reshape(output.shape))
    output[step.num_tokens :] = 0


def attention(
    shape: AttentionShape,
    query: torch.Tensor,
    context: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over keys and values that lie side by side, in two products of matrices, one matrix a row and key head.

    Unlike torch's fused attention on CPUs, this gives a row the same bits whatever other rows there are.

    Args:
        shape: the layer.
        query: [rows, heads, query_len, head_size].
        context: [rows, 2, kv_heads, context, head_size], keys and values.
        mask: bool [rows, query_len, context], what each token sees.
        sinks: float32 [heads] or ``None``; see ``Device.attend``.

    Returns:
        Like ``query``.
    """
    keys, values = context.float().unbind(1)
    groups = shape.num_heads // shape.num_kv_heads
    # The heads that share keys lie below one another: [rows, kv_heads, groups * query_len, …].
    scores = query.float().unflatten(1, (-1, groups)).flatten(2, 3) @ keys.transpose(-1, -2) * shape.scale
    if shape.softcap:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    scores = scores.unflatten(2, (groups, -1)).masked_fill(~mask[:, None, None], -torch.inf)
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        columns = sinks.float().view(-1, groups, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, columns), dim=-1).softmax(dim=-1)[..., :-1]
    attended = weights.flatten(2, 3) @ values
    result: torch.Tensor = attended.unflatten(2, (groups, -1)).flatten(1, 2).to(query.dtype)
    return result
