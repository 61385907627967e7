"""References of the operators in plain PyTorch, without loops over rows.

Shapes never depend on the tensors' contents.

Caches are [blocks, 2, kv_heads, 1, block, head_size] here. Scores, softmax and sums are in float32, as in the
kernels. Keys and values that no real token sees count as zero, even if they are NaN.
"""

import torch


def paged(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    scale: torch.Tensor,
    start: torch.Tensor,
    tables: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Appends keys and values from position `start` on, then attends over blocks.

    A chunk's padding is written like any token. Tokens beyond the table's end go to block 0, the block of its
    unused entries.

    Args:
        query: [rows, kv_heads, groups, q_len, head_size].
        key: [rows, kv_heads, 1, q_len, head_size].
        value: like `key`.
        cache: written in place.
        scale: scalar.
        start: integers [rows, 1], the position of each row's first token.
        tables: integers [rows, partitions], or [partitions] for a single row.
        mask: [1 or rows, 1, 1, q_len, positions] of 0 and 1, the visible positions of each token; `None` for
            causal attention.
        window: without a mask, the number of visible tokens of each token, itself included; 0 for all.
        sinks: [heads, sinks], scores of extra positions without a value.

    Returns:
        Like `query`.
    """
    rows, _, _, query_len, head_size = query.shape
    block_size = cache.shape[4]
    table = tables.view(rows, -1).long()
    partitions = table.shape[1]
    positions = start.long() + torch.arange(query_len, device=query.device)
    partition = positions // block_size
    blocks = table.gather(1, partition.clamp(max=partitions - 1)).masked_fill(partition >= partitions, 0)
    offsets = positions % block_size
    cache[blocks, 0, :, 0, offsets] = key[:, :, 0].transpose(1, 2).to(cache.dtype)
    cache[blocks, 1, :, 0, offsets] = value[:, :, 0].transpose(1, 2).to(cache.dtype)
    # Shape: rows, partitions, 2, kv_heads, block, head_size; then 2, rows, kv_heads, context, head_size.
    context = cache[table][:, :, :, :, 0].permute(2, 0, 3, 1, 4, 5)
    context = context.reshape(2, rows, -1, partitions * block_size, head_size)
    length = context.shape[3]
    if mask is None:
        seen = torch.arange(length, device=query.device)
        visible = seen <= positions[:, :, None]
        if window:
            visible = visible & (seen > positions[:, :, None] - window)
    else:
        given = (mask != 0)[:, 0, 0, :, :length].expand(rows, -1, -1)
        visible = torch.nn.functional.pad(given, (0, length - given.shape[-1]))
    return attention(query, context[0], context[1], visible, scale, sinks)


def sliding(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    scale: torch.Tensor,
    tables: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Appends to each row's block, attends over a window, and keeps the last window in the block.

    Args:
        query: [rows, kv_heads, groups, q_len, head_size].
        key: [rows, kv_heads, 1, q_len, head_size].
        value: like `key`.
        cache: its blocks hold a window each; written in place. Unfilled places become zero.
        before: integers [rows, 1], tokens in the block before the step.
        after: integers [rows, 1], `before` plus the step's real tokens; a row without real tokens is
            padding and gets zeros.
        scale: scalar.
        tables: integers [rows, 1], or [1] for a single row.
        mask: [rows, 1, 1, window] of 0 and 1, the visible places of a row's only token, itself appended.
        sinks: [heads, sinks].

    Returns:
        Like `query`.
    """
    rows, _, _, query_len, head_size = query.shape
    window = cache.shape[4]
    blocks = tables.view(rows).long()
    before, after = before.long(), after.long()
    device = query.device
    # Token 0 is the oldest one in the block. The buffer has the block's places, then the step's tokens.
    place = torch.arange(window + query_len, device=device)
    token = torch.where(place < window, place, before + place - window)
    own = before + torch.arange(query_len, device=device)
    filled = (place >= window) | (place < before)
    visible = (token[:, None] <= own[:, :, None]) & (token[:, None] > own[:, :, None] - window)
    visible = visible & filled[:, None]
    states = torch.stack((key, value), dim=1)[:, :, :, 0]
    # Shape: rows, 2, kv_heads, window + q_len, head_size.
    context = torch.cat((cache[blocks][:, :, :, 0], states.to(cache.dtype)), dim=3)
    kept = place[:window] + (after - window).clamp(min=0)
    source = torch.where(kept < before, kept, kept - before + window).clamp(max=window + query_len - 1)
    source = source[:, None, None, :, None].expand(-1, 2, cache.shape[2], -1, head_size)
    slid = context.gather(3, source).masked_fill((kept >= after)[:, None, None, :, None], 0)
    cache[blocks] = slid[:, :, :, None]
    if mask is not None:
        return attention(query, slid[:, 0], slid[:, 1], (mask != 0)[:, 0], scale, sinks)
    attended = attention(query, context[:, 0], context[:, 1], visible, scale, sinks)
    return attended.masked_fill((after <= before)[:, :, None, None, None], 0)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scale: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attends with grouped queries. A token that sees nothing gets zeros.

    Args:
        query: [rows, kv_heads, groups, q_len, head_size].
        key: [rows, kv_heads, context, head_size].
        value: like `key`.
        visible: bool [rows, q_len, context].
        scale: scalar.
        sinks: [heads, sinks].

    Returns:
        Like `query`.
    """
    rows, kv_heads, groups, query_len, head_size = query.shape
    unseen = ~visible.any(dim=1)[:, None, :, None]
    key, value = key.float().masked_fill(unseen, 0), value.float().masked_fill(unseen, 0)
    # Heads that share keys are stacked: [rows, kv_heads, groups * q_len, …].
    flat = query.float().reshape(rows, kv_heads, groups * query_len, head_size)
    scores = (flat @ key.transpose(-1, -2) * scale.float()).view(rows, kv_heads, groups, query_len, -1)
    hidden = ~visible[:, None, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    context = scores.shape[-1]
    if sinks is not None:
        columns = sinks.float().view(1, kv_heads, groups, 1, -1).expand(rows, -1, -1, query_len, -1)
        scores = torch.cat((scores, columns), dim=-1)
    weights = scores.softmax(dim=-1)[..., :context].masked_fill(hidden, 0)
    attended = weights.reshape(rows, kv_heads, groups * query_len, context) @ value
    return attended.view(query.shape).to(query.dtype)
