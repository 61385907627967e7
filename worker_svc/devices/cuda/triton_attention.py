"""Paged attention on GPUs: the Triton kernels, with their choice and launch.

A single kernel attends for chunks and decode steps. A program handles a tile of consecutive queries of a
row, with all query heads of a key head. So matrix products get enough rows in decode steps too, and keys and
values are read once for all these heads. If a step's tiles are fewer than the GPU's processors, the context
is split (flash-decoding, https://pytorch.org/blog/flash-decoding/). Splits divide each row's actual length,
so the grid is static and every program has work.

The kernels read all varying values on the device, and a launch depends only on the shapes of its tensors. So
it can be captured in a CUDA graph and replayed on other lengths.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from worker_svc.devices.attention import AttentionCall, AttentionParams, PagedInput

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def write_kernel(
    key, value, cache, slots, key_token, key_head, value_token, value_head, cache_block, cache_half, cache_token, cache_head,
    HEAD_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Writes a token's keys and values, for all heads, to its slot.

    Grid: tokens. Decode steps do not need it.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    element = tl.arange(0, ELEMENTS)
    head, dim = element // HEAD_SIZE, element % HEAD_SIZE
    there = element < KV_HEADS * HEAD_SIZE
    target = (
        cache + slot // BLOCK_SIZE * cache_block + slot % BLOCK_SIZE * cache_token + head * cache_head + dim
    )
    keys = tl.load(key + token * key_token + head * key_head + dim, mask=there)
    tl.store(target, keys, mask=there)
    values = tl.load(value + token * value_token + head * value_head + dim, mask=there)
    tl.store(target + cache_half, values, mask=there)


@triton.jit
def _score(products, scale, softcap, SOFTCAP: tl.constexpr):
    """Turns products of queries and keys into scores in powers of two."""
    scores = products * scale
    if SOFTCAP:
        # tanh(x) is 1 - 2 / (exp(2 x) + 1).
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * _LOG2E / softcap)) + 1.0))
    return scores * _LOG2E


@triton.jit(do_not_specialize_on_alignment=["seq_lens", "query_start", "table", "slots"])
def attend_kernel(
    query, key, value, cache, output, partial, maxima, sums, seq_lens, query_start, table, slots, sinks, scale, softcap,
    query_token, query_head, key_token, key_head, value_token, value_head, output_token, output_head,
    cache_block, cache_half, cache_token, cache_head, table_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUERY_LEN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, WRITES: tl.constexpr,
    QUERIES: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Attends a tile of queries over a split of their context. Grid: rows * tiles, kv_heads, SPLITS.

    Row r of a tile's matrices is head `r % GROUP` of query `r // GROUP`, for QUERIES queries; the rest of
    the M rows is empty. Keys are read N at a time; D is HEAD_SIZE rounded up. With a single split the result
    goes to `output`. Otherwise sums go to `partial` [tokens, HEADS, SPLITS, D], `maxima` and `sums` [tokens,
    HEADS, SPLITS], all float32. WRITES requires a token per row: the kernel reads the token's key and value
    from `key` and `value` and writes them to the cache.
    """
    TILES: tl.constexpr = (QUERY_LEN + QUERIES - 1) // QUERIES  # noqa: N806 - a constant
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tile // TILES
    # The last tiles of a chunk take longest, so they start first.
    first = (TILES - 1 - tile % TILES) * QUERIES
    seq_len = tl.load(seq_lens + row)
    count = tl.load(query_start + row + 1) - tl.load(query_start + row)
    # A row that is written to the null block is all padding.
    count = tl.where(tl.load(slots + row * QUERY_LEN) < BLOCK_SIZE, 0, count)

    line = tl.arange(0, M)
    index, head = first + line // GROUP, kv_head * GROUP + line % GROUP
    inside = (line < QUERIES * GROUP) & (index < QUERY_LEN)
    real = inside & (index < count)
    dim = tl.arange(0, D)
    token = (row * QUERY_LEN + index).to(tl.int64)
    queries = tl.load(
        query + (token * query_token + head * query_head)[:, None] + dim[None, :],
        mask=real[:, None] & (dim < HEAD_SIZE)[None, :], other=0.0,
    )  # fmt: skip

    # Tiles of N keys that any query sees; each split gets an equal share of them.
    start = seq_len - count
    position = start + index
    begin = 0
    if WINDOW:
        begin = tl.maximum(start + first - WINDOW + 1, 0)
    end = tl.where(first < count, start + tl.minimum(first + QUERIES, count), 0)
    last = position
    if WRITES:
        end, last = tl.maximum(end - 1, 0), position - 1
    first_tile = begin // N
    share = tl.cdiv(tl.cdiv(end, N) - first_tile, SPLITS)
    low = (first_tile + split * share) * N
    high = tl.minimum(low + share * N, end)

    largest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    if SINKS:
        # The sink is a score without a value; only the first split counts it.
        sink = tl.load(sinks + head, mask=inside, other=0.0).to(tl.float32) * _LOG2E
        largest = tl.where(split == 0, sink, largest)
        total = tl.where(split == 0, 1.0, total)
    sum_ = tl.zeros([M, D], tl.float32)
    lane = tl.arange(0, N)
    states = cache + kv_head * cache_head
    if WRITES:
        # The first split attends to the row's own token.
        own = (dim < HEAD_SIZE) & (count > 0) & (split == 0)
        own_key = tl.load(key + row.to(tl.int64) * key_token + kv_head * key_head + dim, mask=own, other=0.0)
        own_value = tl.load(
            value + row.to(tl.int64) * value_token + kv_head * value_head + dim, mask=own, other=0.0
        )
        slot = tl.load(slots + row)
        target = states + slot // BLOCK_SIZE * cache_block + slot % BLOCK_SIZE * cache_token + dim
        tl.store(target, own_key, mask=own)
        tl.store(target + cache_half, own_value, mask=own)
        own_products = tl.sum(queries.to(tl.float32) * own_key.to(tl.float32)[None, :], 1)
        score = tl.where(split == 0, _score(own_products, scale, softcap, SOFTCAP), float("-inf"))
        larger = tl.maximum(largest, score)
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        weight = tl.exp2(score - shift)
        total = total * tl.exp2(largest - shift) + weight
        sum_ = weight[:, None] * own_value.to(tl.float32)[None, :]
        largest = larger
    blocks = table + row * table_row
    for place in range(low, high, N):
        at = place + lane
        if BLOCK_SIZE % N == 0:
            block = tl.load(blocks + place // BLOCK_SIZE).to(tl.int64)
            offset = block * cache_block + (place % BLOCK_SIZE + lane) * cache_token
        else:
            block = tl.load(blocks + at // BLOCK_SIZE, mask=at < end, other=0).to(tl.int64)
            offset = block * cache_block + at % BLOCK_SIZE * cache_token
        # Unseen positions may belong to another request or hold NaN.
        there = ((at >= begin) & (at < end))[:, None]
        if HEAD_SIZE != D:
            there = there & (dim < HEAD_SIZE)[None, :]
        source = states + offset[:, None] + dim[None, :]
        keys = tl.load(source, mask=there, other=0.0)
        products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        seen = at[None, :] <= last[:, None]
        if WINDOW:
            seen = seen & (at[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, _score(products, scale, softcap, SOFTCAP), float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        # A query has seen nothing yet if the tile lies entirely before its window.
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(largest - shift)
        total = total * rescale + tl.sum(weights, 1)
        values = tl.load(source + cache_half, mask=there, other=0.0)
        sum_ = sum_ * rescale[:, None]
        sum_ = tl.dot(weights.to(values.dtype), values, sum_, input_precision="ieee")
        largest = larger

    if SPLITS == 1:
        result = tl.where(real[:, None], sum_ / tl.where(total == 0.0, 1.0, total)[:, None], 0.0)
        tl.store(
            output + (token * output_token + head * output_head)[:, None] + dim[None, :],
            result.to(output.dtype.element_ty),
            mask=inside[:, None] & (dim < HEAD_SIZE)[None, :],
        )
    else:
        part = (token * HEADS + head) * SPLITS + split
        worked = real & ((low < high) | (WRITES & (split == 0)))
        tl.store(maxima + part, tl.where(worked, largest, float("-inf")), mask=inside)
        tl.store(sums + part, tl.where(worked, total, 0.0), mask=inside)
        tl.store(partial + part[:, None] * D + dim[None, :], sum_, mask=worked[:, None])


@triton.jit
def combine_kernel(
    partial, maxima, sums, output, output_token, output_head,
    HEAD_SIZE: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Combines a head's splits.

    Grid: tokens, heads. PARTS is SPLITS rounded up; see `attend_kernel`.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, dim = tl.arange(0, PARTS), tl.arange(0, D)
    part = (token * tl.num_programs(1) + head) * SPLITS + split
    largest = tl.load(maxima + part, mask=split < SPLITS, other=float("-inf"))
    total = tl.load(sums + part, mask=split < SPLITS, other=0.0)
    worked = total > 0.0
    shift = tl.max(tl.where(worked, largest, float("-inf")), 0)
    factor = tl.where(worked, tl.exp2(largest - tl.where(shift == float("-inf"), 0.0, shift)), 0.0)
    sum_ = tl.load(partial + part[:, None] * D + dim[None, :], mask=worked[:, None], other=0.0)
    sum_ = tl.sum(sum_ * factor[:, None], 0)
    total = tl.sum(total * factor, 0)
    result = sum_ / tl.where(total == 0.0, 1.0, total)
    target = output + token * output_token + head * output_head + dim
    tl.store(target, result.to(output.dtype.element_ty), mask=dim < HEAD_SIZE)


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
    attend_kernel[launch.grid](
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
        combine_kernel[(tokens, params.num_heads)](
            partial, maxima, sums, output, *output.stride()[:2],
            HEAD_SIZE=params.head_size, D=launch.head_elements, SPLITS=launch.splits,
            PARTS=_power_of_two(launch.splits), num_warps=4,
        )  # fmt: skip


def _write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, plan: TritonPlan) -> None:
    tokens, kv_heads, head_size = key.shape
    write_kernel[(tokens,)](
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
    """Divides a step into programs; `item` is the bytes of an element, `count` the GPU's processors."""
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
