"""Paged attention in plain PyTorch: gather the blocks, mask, attend.

It is correct everywhere and fast nowhere: the fallback of a device without kernels, and the reference that
tests compare kernels with.
"""

import functools
from dataclasses import dataclass

import torch
from torch.nn import functional

from worker_svc.devices.attention import AttentionCall, AttentionParams, PagedInput


@dataclass(frozen=True)
class GatheredPlan:
    """A step and the positions of its tokens."""

    step: PagedInput
    """The step's input."""
    positions: torch.Tensor
    """int64 [rows, query_len]: each token's position in its row's sequence; padding continues the count."""

    @classmethod
    def of(cls, step: PagedInput) -> "GatheredPlan":
        """Derives the positions from a step's lengths."""
        counts = step.query_start[1:] - step.query_start[:-1]
        first = (step.seq_lens - counts).long()
        query_len = step.slot_mapping.shape[0] // step.seq_lens.shape[0]
        return cls(step, first[:, None] + torch.arange(query_len, device=first.device))


def attend(call: AttentionCall, plan: GatheredPlan) -> None:
    """Runs `Device.attend` on a cache [blocks, 2, block_size, kv_heads, head_size]."""
    params, query, cache, output = call.params, call.query, call.cache, call.output
    step, block_size = plan.step, cache.shape[2]
    if call.new_states is not None:
        key, value = call.new_states
        blocks, offsets = step.slot_mapping // block_size, step.slot_mapping % block_size
        cache[blocks, 0, offsets] = key
        cache[blocks, 1, offsets] = value
    # Shape: rows, 2, kv_heads, context, head_size.
    context = cache[step.block_table.long()].transpose(1, 2).flatten(2, 3).transpose(2, 3)
    seen = torch.arange(context.shape[3], device=query.device)
    mask = seen <= plan.positions[:, :, None]
    if params.window:
        mask &= seen > plan.positions[:, :, None] - params.window
    # Positions that no real token of a row sees may belong to another request or hold NaN, and NaN times 0 is
    # NaN.
    unseen = ~(mask & (plan.positions < step.seq_lens[:, None])[:, :, None]).any(dim=1)
    context = context.masked_fill(unseen[:, None, None, :, None], 0)
    rows, query_len = plan.positions.shape
    queries = query.view(rows, query_len, params.num_heads, params.head_size).transpose(1, 2)
    if params.softcap or params.slopes or call.sinks is not None:
        distances = plan.positions[:, :, None] - seen
        attended = attention(params, queries, context, mask, call.sinks, distances)
    else:
        attended = functional.scaled_dot_product_attention(
            queries, context[:, 0], context[:, 1], attn_mask=mask[:, None],
            scale=params.scale, enable_gqa=params.num_heads != params.num_kv_heads,
        )  # fmt: skip
    output.copy_(attended.transpose(1, 2).reshape(output.shape))
    output[step.num_tokens :] = 0


@functools.cache
def slopes_on(device: torch.device, slopes: tuple[float, ...]) -> torch.Tensor:
    """Returns ALiBi's slopes as a tensor, float32 [heads]. A captured step cannot copy them to the device."""
    return torch.tensor(slopes, device=device)


def attention(
    params: AttentionParams,
    query: torch.Tensor,
    context: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor | None = None,
    distances: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends over keys and values side by side, in two matrix products batched by row and key head.

    Unlike torch's fused attention on CPUs, it gives a row the same bits whatever the other rows are.

    Args:
        params: the layer's.
        query: [rows, heads, query_len, head_size].
        context: [rows, 2, kv_heads, context, head_size], keys and values.
        mask: bool [rows, query_len, context], the positions that each token sees.
        sinks: float32 [heads] or `None`; see `AttentionCall`.
        distances: int64 [rows, query_len, context], how far back each position is; needed for slopes.

    Returns:
        Like `query`.
    """
    keys, values = context.float().unbind(1)
    groups = params.num_heads // params.num_kv_heads
    # Heads that share keys are stacked: [rows, kv_heads, groups * query_len, …].
    scores = query.float().unflatten(1, (-1, groups)).flatten(2, 3) @ keys.transpose(-1, -2) * params.scale
    if params.softcap:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    scores = scores.unflatten(2, (groups, -1))
    if params.slopes:
        assert distances is not None
        slopes = slopes_on(query.device, params.slopes).view(-1, groups, 1, 1)
        scores = scores - slopes * distances[:, None, None]
    scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        columns = sinks.float().view(-1, groups, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, columns), dim=-1).softmax(dim=-1)[..., :-1]
    attended = weights.flatten(2, 3) @ values
    result: torch.Tensor = attended.unflatten(2, (groups, -1)).flatten(1, 2).to(query.dtype)
    return result
