"""Checks that weights, graphs and KV cache fit into the device's memory before any of them is made.

The working memory of a graph is estimated from shapes. `width` is the sum of the input and output sizes of
all matrices of the widest layer (an expert layer's matrices count once for each expert). Layers take turns in
the same memory, so a step of `tokens` tokens needs at most ::

    tokens * (width * itemsize + 6 * hidden * 4)

bytes. The second term is for norms, which some models compute in float32. Recorded graphs own their memory,
so their needs add up over all signatures. Without recording, only the largest step counts.
The logits of the largest bucket, in the model's type and in float32, add ::

    rows * vocab * (itemsize + 4)

Sampling adds its workspace and its parameter tables with a row per slot. They count from the start,
although the first request allocates them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from protos.errors import ConfigurationRefused
from worker_svc.devices.base import Device, is_host
from worker_svc.execution.kv_cache import count_blocks
from worker_svc.model_files.checkpoint import Checkpoint
from worker_svc.sampling.state import sampling_bytes, state_bytes
from worker_svc.shapes import KvGroup, ModelSize, PoolShapeConfig, ShapeConfig

_GIB = 2**30
_FLOAT32 = 4
_WIDE_STATES = 6
# Bytes per element. "auto" runs models that were saved in float32 in half precision.
_ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}


def working_bytes(size: ModelSize, steps: Sequence[int], rows: int, *, recorded: bool) -> int:
    """Returns the bytes of steps in addition to weights and KV cache.

    Args:
        size: the model's.
        steps: tokens of a step, for each signature.
        rows: rows of the largest batch of logits.
        recorded: whether each signature owns memory, as recorded graphs do.
    """
    per_token = size.width * size.itemsize + _WIDE_STATES * size.hidden_size * _FLOAT32
    logits = rows * size.vocab_size * (size.itemsize + _FLOAT32)
    return (sum(steps) if recorded else max(steps)) * per_token + logits


def check_weights(checkpoint: Checkpoint, dtype: str, device: Device, *, ranks: int = 1) -> None:
    """Refuses weights larger than the device's free memory, before they are read.

    Args:
        checkpoint: the model's.
        dtype: the `--dtype` setting.
        device: still without any part of the model.
        ranks: the number of ranks that share the model.

    Raises:
        ConfigurationRefused: with both sizes.
    """
    free = free_memory(device)
    needed = checkpoint.num_bytes(_ITEMSIZES[dtype]) // ranks
    if free is not None and needed > free:
        smaller = ", --dtype bfloat16" if dtype == "float32" else ""
        raise ConfigurationRefused(
            f"the weights need {_gib(needed)}, but device {device.name} has {_gib(free)} free;"
            f" use a smaller model{smaller} or a device with more memory"
        )


def free_memory(device: Device) -> int | None:
    """Returns the free bytes, or `None` if the device cannot tell."""
    try:
        return device.free_memory()
    except ConfigurationRefused:
        return None


@dataclass(frozen=True)
class MemoryBudget:
    """Divides the memory left by the weights between graphs and KV cache."""

    device: Device
    size: ModelSize
    """The model's."""
    recorded: bool
    """Whether steps run as recorded graphs; see `working_bytes`."""
    kv_memory: float | None
    """The setting `--kv-memory`: GiB of KV cache."""
    kv_share: float
    """The setting `--kv-share`: the KV cache's share of the memory left by weights and graphs."""
    before_load: bool = False
    """Whether the weights are still to be read. Those of a CPU take no memory until then."""

    def _free(self) -> int | None:
        free = free_memory(self.device)
        pending = self.before_load and is_host(self.device.torch_device)
        if free is not None and (pending or self.device.defers_weights):
            free -= self.size.weight_bytes
        return free

    def check_pooling(self, shapes: PoolShapeConfig) -> None:
        """Refuses shapes of a pooling model that do not fit.

        Raises:
            ConfigurationRefused: with the numbers.
        """
        free = self._free()
        steps = [shape.num_tokens for shape in shapes.pool_shapes]
        working = working_bytes(self.size, steps, 0, recorded=self.recorded)
        if free is not None and working > free:
            needed = (
                f"graphs of {len(steps)} shapes need"
                if self.recorded
                else f"a step of {max(steps)} tokens needs"
            )
            raise ConfigurationRefused(
                f"{self._beside(free)}, but {needed} {_gib(working)};"
                " lower --pool-batch-sizes or --pool-prompt-lens"
            )

    def fit(self, shapes: ShapeConfig, groups: Sequence[KvGroup]) -> ShapeConfig:
        """Returns the shapes with their blocks counted.

        Raises:
            ConfigurationRefused: if memory is short; names the numbers and a fitting setting.
        """
        free = self._free()
        if free is None and self.kv_memory is None and not shapes.num_blocks:
            self.device.free_memory()  # raises with advice
        working = self._working(shapes)
        if free is not None and working >= free:
            raise ConfigurationRefused(
                f"{self._beside(free)}, but graphs need {_gib(working)}; {self._smaller(shapes, free)}"
            )
        if shapes.num_blocks:
            counted = shapes
        else:
            share = ((free or 0) - working) * self.kv_share
            budget = int(share if self.kv_memory is None else self.kv_memory * _GIB)
            counted = _count(shapes, groups, budget)
        sizes = [group.bytes_per_token * group.tokens_per_block(shapes.block_size) for group in groups]
        cache = sum(size * count for size, count in zip(sizes, counted.num_blocks, strict=True))
        if free is not None and cache + working > free:
            left = free - working
            if shapes.num_blocks:
                # The setting is one number for all groups.
                setting = f"--num-blocks {left // sum(sizes)} would"
            else:
                parts = 100 if left * 100 >= _GIB else 10**6  # never 0
                setting = f"--kv-memory {left * parts // _GIB / parts:g} would"
            if left // sum(sizes) <= shapes.table_width:
                setting = "not even one sequence would; lower --max-model-len or use a smaller model"
            raise ConfigurationRefused(
                f"{self._beside(free)}, but {_gib(cache)} of KV cache and {_gib(working)} of graphs do not"
                f" fit; {setting}"
            )
        return counted

    def _working(self, shapes: ShapeConfig) -> int:
        steps = (*shapes.chunk_sizes, *shapes.decode_buckets)
        rows, vocab = shapes.decode_buckets[-1], self.size.vocab_size
        graphs = working_bytes(self.size, steps, rows, recorded=self.recorded)
        if self.size.adapter_width:
            # Each step has a second graph.
            wider = replace(self.size, width=self.size.width + self.size.adapter_width)
            adapted = working_bytes(wider, steps, 0, recorded=self.recorded)
            graphs = graphs + adapted if self.recorded else max(graphs, adapted)
        sampling = sampling_bytes(rows, vocab, shapes.max_model_len)
        return graphs + sampling + state_bytes(shapes.max_num_seqs, vocab)

    def _beside(self, free: int) -> str:
        weights = _gib(self.size.weight_bytes)
        return f"device {self.device.name} has {_gib(free)} free beside {weights} of weights"

    def _smaller(self, shapes: ShapeConfig, free: int) -> str:
        """Names a setting for graphs that fit."""

        def chunk(count: int) -> ShapeConfig:
            scaled = tuple(max(1, size * count // shapes.chunk) for size in shapes.chunk_sizes)
            return replace(shapes, chunk=count, prefill_buckets=scaled)

        def seqs(count: int) -> ShapeConfig:
            below = [bucket for bucket in shapes.decode_buckets if bucket < count]
            return replace(shapes, max_num_seqs=count, decode_buckets=(*below, count))

        ways: list[tuple[str, int, Callable[[int], ShapeConfig]]] = [
            ("--max-num-batched-tokens", shapes.chunk, chunk),
            ("--max-num-seqs", shapes.max_num_seqs, seqs),
        ]
        # Try the larger part of the memory first.
        if sum(shapes.chunk_sizes) < sum(shapes.decode_buckets):
            ways.reverse()
        for flag, count, changed in ways:
            for halvings in range(1, count.bit_length()):
                fewer = count >> halvings
                if changed is chunk:  # chunks line up with blocks
                    block = shapes.block_size
                    fewer = fewer - fewer % block if fewer > block else math.gcd(fewer, block)
                if self._working(changed(fewer)) < free:
                    # A manual list of buckets ends with the setting.
                    buckets = "--prefill-buckets" if changed is chunk else "--decode-buckets"
                    return f"{flag} {fewer} would fit, with {buckets} up to it if they are set"
        return "use a smaller model or a device with more memory"


def _count(shapes: ShapeConfig, groups: Sequence[KvGroup], budget: int) -> ShapeConfig:
    """Returns the shapes with as many blocks as fit into `budget` bytes."""
    try:
        return replace(shapes, num_blocks=count_blocks(groups, shapes, budget))
    except ConfigurationRefused as error:
        # The text ends with the setting to lower; add the largest fitting length.
        for width in range(shapes.table_width - 1, 0, -1):
            shorter = replace(shapes, max_model_len=width * shapes.block_size, windows_kept_per_slot=0)
            needed = sum(
                group.bytes_per_token * group.tokens_per_block(shapes.block_size) * (1 + group.blocks_in_use(shorter))
                for group in groups
            )  # fmt: skip
            if needed <= budget:
                raise ConfigurationRefused(f"{error.message} to {shorter.max_model_len}") from error
        raise


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.3g} GiB"
