"""The memory of keys and values: a tensor per KV group, addressed by the scheduler's block ids."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from protos.errors import ConfigurationRefused
from protos.steps import BlockCopy
from worker_svc.devices.base import Device
from worker_svc.shapes import KvGroup, ShapeConfig


class KvCache:
    """The memory of all KV groups."""

    def __init__(
        self, device: Device, groups: Sequence[KvGroup], block_size: int, num_blocks: Sequence[int]
    ) -> None:
        """Allocates zeroed memory, so that padding reads finite numbers.

        Raises:
            ConfigurationRefused: if there is not enough memory.
        """
        self._device = device
        self._groups = tuple(groups)
        self._tokens_per_block = [group.tokens_per_block(block_size) for group in groups]
        # Per group, tensors [layers, ...]. Usually a single tensor, so that a block's copy is one operation.
        self._tensors: list[list[torch.Tensor]] = []
        try:
            for group, count in zip(groups, num_blocks, strict=True):
                shape = device.cache_shape(group, count, block_size)
                own = len(group.own_layers)
                layers = [1] * own if device.caches_are_inputs else [own] * bool(own)
                self._tensors.append(
                    [device.allocate((each, *shape), group.layers[0].dtype) for each in layers]
                )
        except RuntimeError as error:
            gib = sum(c * b for c, b in zip(num_blocks, self.bytes_per_block, strict=True)) / 2**30
            raise ConfigurationRefused(
                f"a KV cache of {gib:.1f} GiB does not fit into memory; lower --kv-memory"
            ) from error

    @property
    def bytes_per_block(self) -> tuple[int, ...]:
        """Bytes of a block of each group, over all of its layers."""
        return tuple(
            group.bytes_per_token * tokens
            for group, tokens in zip(self._groups, self._tokens_per_block, strict=True)
        )

    def by_layer(self) -> dict[str, torch.Tensor]:
        """Returns each layer's cache by name: a view of its group's tensor, or its own tensor."""
        return {
            layer.name: cache
            for group, tensors in zip(self._groups, self._tensors, strict=True)
            for layer, cache in zip(group.own_layers, itertools.chain.from_iterable(tensors), strict=True)
        }

    def clear(self, group_id: int, block_ids: Sequence[int]) -> None:
        """Zeroes blocks before another request uses them.

        Kernels read whole tiles and multiply the entries past a sequence's end by 0. This hides any finite
        value, but 0 times NaN is NaN: without zeroing, a broken request would break the next.
        """
        for caches, block in itertools.product(self._tensors[group_id], block_ids):
            self._device.clear_block(caches, block)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks, in order. Only the device knows the layout within a block."""
        for copy in copies:
            caches = self._tensors[copy.group_id]
            self._device.copy_block(caches, copy.source_block, copy.target_block, copy.num_tokens)


def count_blocks(groups: Sequence[KvGroup], shapes: ShapeConfig, budget: int) -> tuple[int, ...]:
    """Returns how many blocks of each group fit into `budget` bytes, in the ratio of the longest sequences.

    The count stops at the need of all slots at full length, including the windows kept per slot. Shorter
    sequences leave blocks free for cached prefixes. Short of memory, fewer windows are kept to fit at least
    one sequence.

    Raises:
        ConfigurationRefused: if not even one sequence of the longest length fits.
    """
    bytes_per_block = [group.bytes_per_token * group.tokens_per_block(shapes.block_size) for group in groups]
    usable = budget - sum(bytes_per_block)  # minus the null blocks
    per_sequence, one = [0], 0
    for kept in range(shapes.windows_kept_per_slot, -1, -1):
        fewer = replace(shapes, windows_kept_per_slot=kept)
        per_sequence = [group.blocks_per_sequence(fewer) for group in groups]
        one = sum(size * count for size, count in zip(bytes_per_block, per_sequence, strict=True))
        if usable >= one:
            break
    else:
        raise ConfigurationRefused(
            f"one sequence of {shapes.max_model_len} tokens needs {one / 2**20:.0f} MiB of KV cache, but"
            f" {max(budget, 0) / 2**20:.0f} MiB are available; raise --kv-memory or lower --max-model-len"
        )
    sequences = min(usable / one, shapes.max_num_seqs)
    return tuple(1 + int(count * sequences) for count in per_sequence)
