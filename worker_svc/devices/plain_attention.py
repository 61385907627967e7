"""Attention in plain PyTorch with static shapes: paged, over latent vectors (MLA), in a window in place.

It is correct everywhere and fast nowhere: the fallback of devices without such kernels, and the reference
that tests compare kernels with. A row's result depends on the row only.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from protos.steps import GroupKind
from worker_svc.devices.attention import AttentionCall, AttentionParams, InPlaceInput, PagedInput, StepInput
from worker_svc.shapes import KvGroup


def cache_shape(group: KvGroup, num_blocks: int, block_size: int) -> tuple[int, ...] | None:
    """Returns the shape of a layer's cache; `None` for paged keys and values, which devices lay out.

    In place: [blocks, 2, kv_heads, window, head_size]. Latent: [blocks, block_size, head_size].
    """
    layer = group.layers[0]
    if group.kind is GroupKind.IN_PLACE_WINDOW:
        return (num_blocks, 2, layer.num_kv_heads, group.window, layer.head_size)
    return (num_blocks, block_size, layer.head_size) if layer.latent else None


def plan_step(group: KvGroup, step: StepInput, block_size: int = 0) -> "InPlacePlan | LatentPlan | None":
    """Prepares a step of a group with a cache of `cache_shape`; for `block_size` see `LatentPlan.of`."""
    if isinstance(step, InPlaceInput):
        return InPlacePlan.of(group, step)
    return LatentPlan.of(step, block_size=block_size) if group.layers[0].latent else None


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


def _attend_gathered(call: AttentionCall, plan: GatheredPlan) -> None:
    """Attends over a cache [blocks, 2, block_size, kv_heads, head_size]."""
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


@dataclass(frozen=True)
class LatentPlan:
    """The data that a group's layers share in a step."""

    step: PagedInput
    """The step's input."""
    rows: Sequence["LatentRows"]
    """The step's rows, in order: all together, or singly with no more blocks than each needs."""

    @classmethod
    def of(cls, step: PagedInput, *, block_size: int = 0) -> "LatentPlan":
        """Derives the visible places of rows from a step's lengths.

        Args:
            step: the step.
            block_size: tokens of a block, to read no block beyond a row's end. The lengths must then be on
                the host. 0 to read the whole table, in shapes that do not depend on lengths.
        """
        positions = GatheredPlan.of(step).positions
        if not block_size:
            return cls(step, [LatentRows(positions, step.seq_lens.long(), step.block_table.long())])
        lengths = step.seq_lens.long()
        used = (-(-length // block_size) for length in lengths.tolist())
        return cls(
            step,
            [
                LatentRows(positions[row : row + 1], lengths[row : row + 1], table[None, :blocks].long())
                for row, (table, blocks) in enumerate(zip(step.block_table, used, strict=True))
            ],
        )


@dataclass(frozen=True)
class LatentRows:
    """Some rows of a step."""

    positions: torch.Tensor
    """int64 [rows, query_len]: as in `GatheredPlan`."""
    lengths: torch.Tensor
    """int64 [rows]: tokens of each row's sequence, including this step's."""
    blocks: torch.Tensor
    """int64 [rows, width]: the blocks to read."""


def _attend_latent(call: AttentionCall, plan: LatentPlan) -> None:
    """Attends over latent vectors. Padding gets finite values.

    The cache holds a key per token, whose leading elements are the value of all heads.
    """
    params, cache, key = call.params, call.cache, call.key
    assert key is not None
    cache.view(-1, params.head_size).index_copy_(0, plan.step.slot_mapping, key[:, 0])
    first = 0
    for rows in plan.rows:
        count, query_len = rows.positions.shape
        tokens = slice(first, first + count * query_len)
        first = tokens.stop
        context = cache[rows.blocks].flatten(1, 2)
        seen = torch.arange(context.shape[1], device=context.device)
        # Unwritten memory may hold NaN, and NaN times 0 is NaN.
        context = context.masked_fill((seen >= rows.lengths[:, None]).unsqueeze(-1), 0).float()
        # [rows, query_len * heads, …]: all heads share the keys.
        query = call.query[tokens].float().view(count, -1, params.head_size)
        scores = torch.bmm(query, context.transpose(1, 2)).view(count, query_len, params.num_heads, -1)
        hidden = seen > rows.positions[:, :, None]
        weights = (scores * params.scale).masked_fill(hidden[:, :, None], -torch.inf).softmax(dim=-1)
        mixed = torch.bmm(weights.view(count, -1, context.shape[1]), context[..., : params.latent])
        call.output[tokens] = mixed.view(-1, params.num_heads, params.latent).to(call.output.dtype)


@dataclass(frozen=True)
class InPlacePlan:
    """The data that a group's layers share in a step.

    Keys and values lie in a buffer: first the `window` places of the block, then the step's tokens, padding
    included.
    """

    blocks: torch.Tensor
    """int64 [rows]: each row's block."""
    cached: torch.Tensor
    """bool [rows, window]: places of the block that hold tokens."""
    mask: torch.Tensor
    """bool [rows, query_len, window + query_len]: places that each token sees."""
    real: torch.Tensor
    """bool [rows, query_len]: tokens that are not padding."""
    kept: torch.Tensor
    """int64 [rows, window]: the place in the buffer that fills each place of the block after the step."""

    @classmethod
    def of(cls, group: KvGroup, step: InPlaceInput) -> "InPlacePlan":
        """Derives masks and places from a step's lengths, for a window that slides in place."""
        window, query_len = group.window, step.query_len
        before, after = step.cache_seq_len.long(), step.cache_offset.long()
        place = torch.arange(window + query_len, device=before.device)
        in_block = place < window
        # Token 0 is the oldest one in the block.
        token = torch.where(in_block, place, before + place - window)
        filled = torch.where(in_block, place < before, token < after)
        query = before + torch.arange(query_len, device=before.device)
        seen = token[:, None, :] <= query[:, :, None]
        seen &= token[:, None, :] > query[:, :, None] - window
        # Padding sees itself, because a softmax over nothing is NaN.
        own = place == window + torch.arange(query_len, device=before.device)[:, None]
        mask = (seen & filled[:, None, :]) | own
        wanted = place[:window] + (after - window).clamp(min=0)
        # With fewer tokens than the window nothing moves, and the remaining places stay empty.
        kept = torch.where((wanted >= before) & (wanted < after), wanted - before + window, wanted)
        return cls(step.block_table[:, 0].long(), filled[:, :window], mask, query < after, kept)


def _attend_in_place(call: AttentionCall, plan: InPlacePlan) -> None:
    """Attends as NPU kernels do (`sliding_window_attention_naive` of vllm-rbln).

    They keep a block per request: they append the step's keys and values, attend, and keep the last `window`
    tokens.
    """
    params, cache, output = call.params, call.cache, call.output
    assert call.new_states is not None  # group_layers refuses layers that read another one's window
    rows, query_len = plan.real.shape
    fresh = torch.stack(call.new_states).view(2, rows, query_len, params.num_kv_heads, params.head_size)
    cached = cache[plan.blocks].masked_fill_(~plan.cached[:, None, None, :, None], 0)
    # Shape: rows, 2, kv_heads, window + query_len, head_size.
    context = torch.cat((cached, fresh.permute(1, 0, 3, 2, 4)), dim=3)
    attended = attention(
        params,
        call.query.view(rows, query_len, params.num_heads, params.head_size).transpose(1, 2),
        context,
        plan.mask,
        call.sinks,
    )
    attended = attended.transpose(1, 2).masked_fill(~plan.real[:, :, None, None], 0)
    output.copy_(attended.reshape(output.shape))
    kept = plan.kept[:, None, None, :, None].expand_as(cached)
    cache[plan.blocks] = context.gather(3, kept)


PlainPlan = GatheredPlan | LatentPlan | InPlacePlan
"""A step's attention in plain PyTorch."""


def attend(call: AttentionCall, plan: PlainPlan) -> None:
    """Runs `Device.attend`. The cache of a `GatheredPlan` is [blocks, 2, block_size, kv_heads, head_size]."""
    match plan:
        case GatheredPlan():
            _attend_gathered(call, plan)
        case LatentPlan():
            _attend_latent(call, plan)
        case InPlacePlan():
            _attend_in_place(call, plan)
