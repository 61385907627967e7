"""Attention by its definition."""

import torch

from worker_svc.devices.attention import AttentionParams


def naive_attention(
    params: AttentionParams,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns what queries [tokens, heads, size] at the positions from `first` on get.

    Keys and values [tokens, kv heads, size] begin at position 0.
    """
    group = params.num_heads // params.num_kv_heads
    keys, values = (each.float().repeat_interleave(group, dim=1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * params.scale
    if params.softcap:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    behind = first + torch.arange(len(query))[:, None] - torch.arange(len(keys))
    if params.slopes:
        scores -= torch.tensor(params.slopes)[:, None, None] * behind
    hidden = (behind < 0) & params.causal
    if params.window:
        hidden |= behind.abs() >= params.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, len(query), 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
