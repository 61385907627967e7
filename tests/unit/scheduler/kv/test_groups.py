"""KV group managers one by one: the hits they find, the blocks they take and free."""

import pytest

from scheduler_svc.kv.groups import BlockLayout, FullGroup, InPlaceWindowGroup, PagedWindowGroup, Table
from tests.support.scheduler.factories import make_pool

KEYS = [bytes([letter]) for letter in b"abcdefgh"]
WHOLE = BlockLayout(block_size=4, chunk=4, hash_block_size=4, hit_stride=1)
HALVES = BlockLayout(block_size=4, chunk=2, hash_block_size=2, hit_stride=1)


def cached(group: FullGroup, count: int, *, without: str = "") -> Table:
    """Returns a table with ``count`` indexed hash blocks, except those of the letters in ``without``."""
    per_block = 2 if group._layout is HALVES else 1
    table = Table(group.pool.allocate(-(-count // per_block)) or [])
    for index in range(count):
        if chr(KEYS[index][0]) not in without:
            group.index(table, KEYS, index, index + 1)
    return table


def test_a_full_attention_hit_ends_at_the_first_missing_hash_block() -> None:
    """Cached ``[a b][c -]``, keys a b c d: a hit of 3; the third is copied out of the second block."""
    group = FullGroup(make_pool(), HALVES)
    table = cached(group, 3)
    assert group.longest_hit(KEYS, 4) == 3
    taken, source = group.take_hit(KEYS, 3)
    assert (taken.blocks, source) == (table.blocks[:1], table.blocks[1])
    assert [block.ref_count for block in table.blocks] == [2, 2]


def test_a_hit_is_a_multiple_of_the_hit_stride() -> None:
    """Blocks of 4 under chunks of 8: three cached blocks are one and a half chunks."""
    group = FullGroup(make_pool(), BlockLayout(block_size=4, chunk=8, hash_block_size=4, hit_stride=2))
    cached(group, 3)
    assert group.longest_hit(KEYS, 4) == 2


def test_indexing_includes_copied_content() -> None:
    """A block that began as a copy is found at each of its hash blocks once it is written on."""
    group = FullGroup(make_pool(), HALVES)
    table = Table(group.pool.allocate(1) or [])
    assert group.index(table, KEYS, 1, 2) == [0, 1]
    assert table.blocks[0].keys == KEYS[:2]


def test_full_attention_frees_its_last_block_first() -> None:
    """A prefix is found from its start, so its end is evicted first."""
    group = FullGroup(make_pool(4), WHOLE)
    table = cached(group, 3)
    assert group.trim(table, 12) == 0
    group.release(table)
    assert group.pool.allocate(1) == [table.blocks[2]]


def test_a_paged_window_needs_only_what_its_next_query_sees() -> None:
    """Window 8, blocks of 4, cached ``[-, b, c, -, e]``: keys a b c d e hit 3, with a null block first."""
    group = PagedWindowGroup(make_pool(), WHOLE, 8)
    table = cached(group, 5, without="ad")
    assert group.longest_hit(KEYS, 5) == 3
    taken, source = group.take_hit(KEYS, 3)
    assert (taken.blocks, taken.first, source) == ([group.pool.null, *table.blocks[1:3]], 1, None)


@pytest.mark.parametrize(
    ("window", "without", "hit"),
    [
        (1, "abcde", 5),
        (4, "abcd", 5),
        (5, "abcd", 5),
        (6, "abcd", 0),
        (6, "abc", 5),
        (9, "abc", 5),
        (10, "abc", 0),
    ],
)
def test_how_far_a_paged_window_reaches(window: int, without: str, hit: int) -> None:
    """At token 20 over blocks of 4, a query sees ``window - 1`` earlier positions."""
    group = PagedWindowGroup(make_pool(), WHOLE, window)
    cached(group, 5, without=without)
    assert group.longest_hit(KEYS, 5) == hit


def test_a_paged_window_hit_may_end_inside_a_block() -> None:
    """Window 3, cached ``[- -][c -]``: a hit at 6 tokens sees positions 4 and 5, which are copied."""
    group = PagedWindowGroup(make_pool(), HALVES, 3)
    table = cached(group, 3, without="ab")
    assert table.blocks[1].keys == [b"c"]
    assert group.longest_hit(KEYS, 4) == 3
    taken, source = group.take_hit(KEYS, 3)
    assert (taken.blocks, taken.first, source) == ([group.pool.null], 1, table.blocks[1])


def test_a_paged_window_frees_blocks_behind_it() -> None:
    """Window 5, blocks of 4: the query at 12 sees from 8 on, so two blocks are freed, the oldest first."""
    group = PagedWindowGroup(make_pool(4), WHOLE, 5)
    table = cached(group, 3)
    first = table.blocks[0]
    assert [group.trim(table, computed) for computed in (7, 8, 11, 12, 12)] == [0, 1, 0, 1, 0]
    assert (table.blocks[:2], table.first, table.live) == ([group.pool.null] * 2, 2, table.blocks[2:])
    assert group.pool.allocate(1) == [first]
    group.release(table)
    assert group.pool.num_free == 2


@pytest.mark.parametrize(("window", "chunk", "most"), [(4, 4, 3), (8, 4, 4), (1, 4, 2), (5, 8, 4)])
def test_a_paged_window_holds_a_bounded_number_of_blocks(window: int, chunk: int, most: int) -> None:
    """It covers the window of a chunk's first token and the chunk; short sequences hold less."""
    group = PagedWindowGroup(make_pool(), BlockLayout(4, chunk, 4, 1), window)
    assert group.most_blocks(1000) == most
    assert group.most_blocks(3) == 1


def test_an_in_place_window_is_found_where_it_was_kept() -> None:
    """Kept at ``[a b]`` and ``[a b c d]``, keys a b c e hit 2 and copy from the kept block."""
    group = InPlaceWindowGroup(make_pool(), WHOLE, 4)
    kept = {}
    for key in (b"b", b"d"):
        block = group.keep(key, cheap=False)
        assert block is not None
        group.pool.index_block(block, (key,))
        kept[key] = block
    assert group.longest_hit([b"a", b"b", b"c", b"e"], 4) == 2
    assert group.longest_hit(KEYS, 4) == 4
    taken, source = group.take_hit(KEYS, 2)
    assert (taken.blocks, source) == ([], kept[b"b"])
    assert (group.copied_tokens(3), group.copied_tokens(9)) == (3, 4)


def test_a_window_is_kept_once() -> None:
    """A second request at the same boundary needs no second copy, but raises the worth of the first."""
    group = InPlaceWindowGroup(make_pool(2), WHOLE, 4)
    block = group.keep(b"a", cheap=True)
    assert block is not None
    group.pool.index_block(block, (b"a",), cheap=True)
    group.pool.free((block,))
    worth = [block.cheap]
    for cheap in (True, False):
        assert group.keep(b"a", cheap=cheap) is None
        worth.append(block.cheap)
    assert worth == [True, True, False]
    assert group.pool.num_free == 1


@pytest.mark.parametrize("group", [FullGroup(make_pool(), WHOLE), InPlaceWindowGroup(make_pool(), WHOLE, 4)])
def test_a_hit_that_is_gone_is_an_error(group: FullGroup | InPlaceWindowGroup) -> None:
    """Nothing may be allocated between looking up a hit and taking it."""
    with pytest.raises(ValueError, match="not in the cache"):
        group.take_hit(KEYS, 1)
