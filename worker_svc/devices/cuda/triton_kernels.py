"""Paged attention on GPUs: the Triton kernels, which `triton_attention` launches.

A single kernel attends for chunks and decode steps. A program handles a tile of consecutive queries of a
row, with all query heads of a key head. So matrix products get enough rows in decode steps too, and keys and
values are read once for all these heads. If a step's tiles are fewer than the GPU's processors, the context
is split (flash-decoding, https://pytorch.org/blog/flash-decoding/). Splits divide each row's actual length,
so the grid is static and every program has work.

The kernels read all varying values on the device, so a launch can be captured in a CUDA graph and replayed
on other lengths.
"""

import triton
import triton.language as tl

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
