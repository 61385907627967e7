"""Attention over a paged cache of latent vectors (MLA), in plain PyTorch with static shapes.

The cache is [blocks, block_size, head_size]: a key per token, whose leading elements are the value of all
heads. A row's result depends on the row only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker_svc.devices.attention import AttentionCall, PagedInput
from worker_svc.devices.gather_attention import GatheredPlan
from worker_svc.shapes.shape_config import KvGroup


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


def cache_shape(group: KvGroup, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """Returns the shape of a layer's cache."""
    return (num_blocks, block_size, group.layers[0].head_size)


def attend(call: AttentionCall, plan: LatentPlan) -> None:
    """Runs `Device.attend`. Padding gets finite values."""
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
