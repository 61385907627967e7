"""Paged attention on GPUs: chooses and launches the kernels of `triton_kernels`.

Besides the tensors themselves, a launch depends only on their shapes, so a captured launch can be replayed on
other lengths.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from worker_svc.devices.attention import AttentionCall, AttentionParams, PagedInput
from worker_svc.devices.cuda import triton_kernels as kernels

# Programs per processor in decode steps, which wait for memory. Chunks, which compute, get one.
_DECODE_PROGRAMS_PER_PROCESSOR = 4
_MAX_SPLITS = 64
# Bytes of keys that a program reads at a time, and as many of values.
_TILE_BYTES = 16384
# How many loop iterations ahead loads start. Half of them cover the block table, whose entries locate the
# keys and values.
STAGES = 5
# Rows of a tile's matrices: the fewest that tensor cores take, and the most that registers hold.
_DECODE_ROWS = 16
_CHUNK_ROWS = (128, 64)
# Float32 is multiplied without tensor cores, which would round it.
_FLOAT32_CHUNK_ROWS = (32,)


@dataclass(frozen=True)
class TritonPlan:
    """The tensors of a `PagedInput`.

    It has no other fields, so a captured step can own a copy of each.
    """

    seq_lens: torch.Tensor
    query_start: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor

    @classmethod
    def of(cls, step: PagedInput) -> "TritonPlan":
        """Takes a step's tensors and leaves its host-side numbers."""
        return cls(step.seq_lens, step.query_start, step.block_table, step.slot_mapping)


def attend(call: AttentionCall, plan: TritonPlan) -> None:
    """Runs `Device.attend` on a cache [blocks, 2, kv_heads, block_size, head_size].

    Padded rows get zeros.

    The cache may have any strides, except that the last dimension's stride is 1.
    """
    params, query, output, sinks = call.params, call.query, call.output, call.sinks
    cache = call.cache.transpose(2, 3)
    tokens, rows = query.shape[0], plan.seq_lens.shape[0]
    key = value = None
    key_strides: tuple[int, ...] = (0, 0)
    value_strides = key_strides
    if call.new_states is not None:
        key, value = call.new_states
        key_strides, value_strides = key.stride()[:2], value.stride()[:2]
        if tokens > rows:
            _write(key, value, cache, plan)
    # With one token a row, the program that attends to a row's own token also writes it.
    writes = params.writes and tokens == rows
    launch = _launch(
        params, rows, tokens // rows, cache.shape[2], plan.block_table.shape[1], query.element_size(),
        processors(query.device),
    )  # fmt: skip
    maxima = sums = partial = output
    if launch.splits > 1:
        parts = (tokens, params.num_heads, launch.splits)
        maxima, sums = torch.empty((2, *parts), dtype=torch.float32, device=query.device)
        partial = torch.empty((*parts, launch.head_elements), dtype=torch.float32, device=query.device)
    kernels.attend_kernel[launch.grid](
        query, key if writes else None, value if writes else None, cache, output, partial, maxima, sums,
        plan.seq_lens, plan.query_start, plan.block_table, plan.slot_mapping, sinks, params.scale, params.softcap,
        *query.stride()[:2], *key_strides, *value_strides, *output.stride()[:2], *cache.stride()[:4],
        plan.block_table.stride(0),
        HEADS=params.num_heads, GROUP=params.num_heads // params.num_kv_heads, HEAD_SIZE=params.head_size,
        BLOCK_SIZE=cache.shape[2], QUERY_LEN=tokens // rows, WINDOW=params.window, SOFTCAP=params.softcap > 0,
        SINKS=sinks is not None, WRITES=writes, QUERIES=launch.queries, M=launch.tile_rows, N=launch.keys,
        D=launch.head_elements, SPLITS=launch.splits, num_warps=launch.warps, num_stages=STAGES,
    )  # fmt: skip
    if launch.splits > 1:
        kernels.combine_kernel[(tokens, params.num_heads)](
            partial, maxima, sums, output, *output.stride()[:2],
            HEAD_SIZE=params.head_size, D=launch.head_elements, SPLITS=launch.splits,
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
    """Returns the number of streaming multiprocessors of a GPU.

    On a CPU, where Triton's interpreter runs, it returns a number small enough for tests.
    """
    if device.type != "cuda":
        return 8
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count)


@dataclass(frozen=True)
class _Launch:
    """How a step's work is divided into programs; see `attend_kernel`."""

    grid: tuple[int, int, int]
    """Tiles of all rows, key heads, splits."""
    queries: int
    """Queries of a tile."""
    tile_rows: int
    """Rows of a tile's matrices: its queries times the heads that share a key head, rounded up."""
    keys: int
    """Keys that a program reads at a time."""
    head_elements: int
    """Elements of a head, rounded up."""
    splits: int
    """Parts that a row's context is divided into."""
    warps: int
    """Warps of a program."""


@functools.cache
def _launch(
    params: AttentionParams, rows: int, query_len: int, block_size: int, width: int, item: int, count: int
) -> _Launch:
    """Divides a step into programs.

    Args:
        params: the layer's.
        rows: of the step.
        query_len: tokens of a row.
        block_size: tokens of a block.
        width: entries of a row of the block table.
        item: bytes of an element.
        count: processors of the GPU.
    """
    group = params.num_heads // params.num_kv_heads
    elements = max(16, _power_of_two(params.head_size))
    keys = min(64, max(16, _TILE_BYTES // (elements * item)))

    def divide(tile_rows: int) -> tuple[int, int, int]:
        """Returns rows and queries of a tile, and the tiles of all rows and key heads."""
        tile_rows = max(tile_rows, _power_of_two(group))
        queries = min(tile_rows // group, query_len)
        return tile_rows, queries, -(-query_len // queries) * rows * params.num_kv_heads

    if query_len == 1:
        tile_rows, queries, tiles = divide(_DECODE_ROWS)
        wanted = count * (_DECODE_PROGRAMS_PER_PROCESSOR if elements * item <= 128 else 2)
    else:
        divided = [divide(size) for size in (_FLOAT32_CHUNK_ROWS if item == 4 else _CHUNK_ROWS)]
        # Large tiles read less, but there must be enough tiles for all processors.
        tile_rows, queries, tiles = next((each for each in divided if each[2] >= 2 * count), divided[-1])
        wanted = count
    longest = width * block_size if not params.window else params.window + queries + keys
    splits = max(1, min(wanted // tiles, -(-longest // keys), _MAX_SPLITS))
    grid = (tiles // params.num_kv_heads, params.num_kv_heads, splits)
    warps = 8 if tile_rows > 64 or tile_rows * elements * item > 64 * 128 * 2 else 4
    return _Launch(grid, queries, tile_rows, keys, elements, splits, warps)


def _power_of_two(number: int) -> int:
    """Returns the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
