"""Paged attention on GPUs: what a launch of the kernels in ``triton_kernels`` is made of.

All that a launch depends on besides tensors follows from their shapes, so that a captured one can be replayed on other lengths.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from worker_svc.devices import triton_kernels as kernels
from worker_svc.devices.base import AttentionInput, AttentionShape

# Programs at work at the same time: of decode steps, which wait for memory, and of chunks, which compute.
_DECODE_PROGRAMS_PER_PROCESSOR = 4
_MAX_SPLITS = 64
# Bytes of keys that a program reads at a time, and as much again of values.
_TILE_BYTES = 16384
# How far ahead loads begin, in turns of the loop: half of it the table's, whose entries say where to load keys and values from.
STAGES = 5
# Rows of a tile's matrices: the fewest that the matrix units take, and as many as registers hold.
_DECODE_ROWS = 16
_CHUNK_ROWS = (128, 64)
# Float32 is multiplied without matrix units, as they would round it.
_FLOAT32_CHUNK_ROWS = (32,)


@dataclass(frozen=True)
class TritonPlan:
    """A step's lengths and places; see :class:`AttentionInput`. Nothing but tensors, which a captured step can have for its own."""

    seq_lens: torch.Tensor
    query_start: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor

    @classmethod
    def of(cls, step: AttentionInput) -> "TritonPlan":
        """All of a step but what the host knows of it."""
        return cls(step.seq_lens, step.query_start, step.block_table, step.slot_mapping)


def attend(
    shape: AttentionShape,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cache: torch.Tensor,
    plan: TritonPlan,
    output: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Like ``Device.attend``, with a cache [blocks, 2, block_size, kv_heads, head_size] of any strides but 1 in the last dimension.

    Padded rows get zeros like padded tokens.
    """
    tokens, rows = query.shape[0], plan.seq_lens.shape[0]
    key_strides: tuple[int, ...] = (0, 0)
    value_strides = key_strides
    if shape.writes and key is not None and value is not None:
        key_strides, value_strides = key.stride()[:2], value.stride()[:2]
        if tokens > rows:
            _write(key, value, cache, plan)
    # Where each row has one token, the program that has it to attend to writes it on the way.
    writes = shape.writes and tokens == rows
    launch = _launch(
        shape, rows, tokens // rows, cache.shape[2], plan.block_table.shape[1], query.element_size(),
        processors(query.device),
    )  # fmt: skip
    maxima = sums = partial = output
    if launch.splits > 1:
        parts = (tokens, shape.num_heads, launch.splits)
        maxima, sums = torch.empty((2, *parts), dtype=torch.float32, device=query.device)
        partial = torch.empty((*parts, launch.head_elements), dtype=torch.float32, device=query.device)
    kernels.attend_kernel[launch.grid](
        query, key if writes else None, value if writes else None, cache, output, partial, maxima, sums,
        plan.seq_lens, plan.query_start, plan.block_table, plan.slot_mapping, sinks, shape.scale, shape.softcap,
        *query.stride()[:2], *key_strides, *value_strides, *output.stride()[:2], *cache.stride()[:4],
        plan.block_table.stride(0),
        HEADS=shape.num_heads, GROUP=shape.num_heads // shape.num_kv_heads, HEAD_SIZE=shape.head_size,
        BLOCK_SIZE=cache.shape[2], QUERY_LEN=tokens // rows, WINDOW=shape.window, SOFTCAP=shape.softcap > 0,
        SINKS=sinks is not None, WRITES=writes, QUERIES=launch.queries, M=launch.tile_rows, N=launch.keys,
        D=launch.head_elements, SPLITS=launch.splits, num_warps=launch.warps, num_stages=STAGES,
    )  # fmt: skip
    if launch.splits > 1:
        kernels.combine_kernel[(tokens, shape.num_heads)](
            partial, maxima, sums, output, *output.stride()[:2],
            HEAD_SIZE=shape.head_size, D=launch.head_elements, SPLITS=launch.splits,
            PARTS=_power_of_two(launch.splits), num_warps=4,
        )  # fmt: skip


def _write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, plan: TritonPlan) -> None:
    tokens, kv_heads, head_size = key.shape
    kernels.write_kernel[(tokens,)](
        key, value, cache, plan.slot_mapping, *key.stride()[:2], *value.stride()[:2], *cache.stride()[:4],
        HEAD_SIZE=head_size, KV_HEADS=kv_heads, BLOCK_SIZE=cache.shape[2],
        ELEMENTS=_power_of_two(kv_heads * head_size), num_warps=4,
    )  # fmt: skip


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; what Triton's interpreter runs on a CPU is to be split too, but not that far."""
    if device.type != "cuda":
        return 8
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count)


@dataclass(frozen=True)
class _Launch:
    """How a step's work is divided; see ``attend_kernel``."""

    grid: tuple[int, int, int]
    queries: int
    """Of a tile."""
    tile_rows: int
    keys: int
    """Read at a time."""
    head_elements: int
    splits: int
    warps: int


@functools.cache
def _launch(
    shape: AttentionShape, rows: int, query_len: int, block_size: int, width: int, item: int, count: int
) -> _Launch:
    """For steps of ``rows`` rows, on ``count`` processors; ``width`` is a table's, ``item`` the bytes of an element."""
    group = shape.num_heads // shape.num_kv_heads
    elements = max(16, _power_of_two(shape.head_size))
    keys = min(64, max(16, _TILE_BYTES // (elements * item)))

    def divide(tile_rows: int) -> tuple[int, int, int]:
        """Rows and queries of a tile, and tiles of all rows and key heads."""
        tile_rows = max(tile_rows, _power_of_two(group))
        queries = min(tile_rows // group, query_len)
        return tile_rows, queries, -(-query_len // queries) * rows * shape.num_kv_heads

    if query_len == 1:
        tile_rows, queries, tiles = divide(_DECODE_ROWS)
        wanted = count * (_DECODE_PROGRAMS_PER_PROCESSOR if elements * item <= 128 else 2)
    else:
        divided = [divide(size) for size in (_FLOAT32_CHUNK_ROWS if item == 4 else _CHUNK_ROWS)]
        # Large tiles read less; small ones are more, for all processors to have some.
        tile_rows, queries, tiles = next((each for each in divided if each[2] >= 2 * count), divided[-1])
        wanted = count
    longest = width * block_size if not shape.window else shape.window + queries + keys
    splits = max(1, min(wanted // tiles, -(-longest // keys), _MAX_SPLITS))
    grid = (tiles // shape.num_kv_heads, shape.num_kv_heads, splits)
    warps = 8 if tile_rows > 64 or tile_rows * elements * item > 64 * 128 * 2 else 4
    return _Launch(grid, queries, tile_rows, keys, elements, splits, warps)


def _power_of_two(number: int) -> int:
    """The smallest that is not less."""
    return 1 << (number - 1).bit_length()
