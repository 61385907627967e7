"""Attention over a window that slides in place, in plain PyTorch with static shapes.

NPU kernels keep a block per request (`sliding_window_attention_naive` of vllm-rbln): they append the step's
keys and values, attend, and keep the last `window` tokens. This module does the same for devices without
such kernels, and is their reference. Shapes depend on the rows, the step's tokens and the window, never on
lengths. A row's result depends on the row only.
"""

from dataclasses import dataclass

import torch

from worker_svc.devices import gather_attention
from worker_svc.devices.attention import AttentionCall, InPlaceInput
from worker_svc.shapes.shape_config import KvGroup


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


def cache_shape(group: KvGroup, num_blocks: int) -> tuple[int, ...]:
    """Returns the shape of a layer's cache: [blocks, 2, kv_heads, window, head_size]."""
    layer = group.layers[0]
    return (num_blocks, 2, layer.num_kv_heads, group.window, layer.head_size)


def attend(call: AttentionCall, plan: InPlacePlan) -> None:
    """Runs `Device.attend` on a cache of `cache_shape`.

    Raises:
        NotImplementedError: for a layer that reads another layer's cache; `group_layers` refuses such
            models.
    """
    params, cache, output = call.params, call.cache, call.output
    if call.new_states is None:
        raise NotImplementedError("two layers cannot share a window that slides in place")
    rows, query_len = plan.real.shape
    fresh = torch.stack(call.new_states).view(2, rows, query_len, params.num_kv_heads, params.head_size)
    cached = cache[plan.blocks].masked_fill_(~plan.cached[:, None, None, :, None], 0)
    # Shape: rows, 2, kv_heads, window + query_len, head_size.
    context = torch.cat((cached, fresh.permute(1, 0, 3, 2, 4)), dim=3)
    attended = gather_attention.attention(
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
