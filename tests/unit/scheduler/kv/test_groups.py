"""KV group managers one by one: which prefixes they find, what they take, what they give up."""

import pytest

from scheduler_svc.kv.groups.base import BlockLayout, Table
from scheduler_svc.kv.groups.full import FullGroup
from scheduler_svc.kv.groups.in_place_window import InPlaceWindowGroup
from scheduler_svc.kv.groups.paged_window import PagedWindowGroup
from tests.support.scheduler.factories import make_pool

KEYS = [bytes([letter]) for letter in b"abcdefgh"]
WHOLE = BlockLayout(block_size=4, chunk=4, hash_block_size=4, hit_stride=1)
HALVES = BlockLayout(block_size=4, chunk=2, hash_block_size=2, hit_stride=1)


def cached(group: FullGroup, count: int, *, without: str = "") -> Table:
    """A table whose ``count`` granules are indexed, but for the blocks of the letters in ``without``."""
    per_block = 2 if group._layout is HALVES else 1
    table = Table(group.pool.allocate(-(-count // per_block)) or [])
    for index in range(count):
        if chr(KEYS[index][0]) not in without:
            group.index(table, KEYS, index, index + 1)
    return table


def test_full_attention_ends_at_the_first_granule_that_is_missing() -> None:
    """Two granules a block, cached ``[a b][c -]``: keys a b c d hit 3, of which the third is copied out of the second block."""
    group = FullGroup(make_pool(), HALVES)
    table = cached(group, 3)
    assert group.longest_hit(KEYS, 4) == 3
    taken, source = group.take_hit(KEYS, 3)
    assert (taken.blocks, source) == (table.blocks[:1], table.blocks[1])
    assert [block.ref_count for block in table.blocks] == [2, 2]


def test_full_attention_needs_every_block() -> None:
    """``[a][-][c]`` hits 1: c is of no use without b."""
    group = FullGroup(make_pool(), WHOLE)
    cached(group, 3, without="b")
    assert group.longest_hit(KEYS, 3) == 1


def test_a_hit_is_a_multiple_of_the_unit() -> None:
    """Blocks of 4 under chunks of 8: three cached blocks are one chunk and a half."""
    group = FullGroup(make_pool(), BlockLayout(block_size=4, chunk=8, hash_block_size=4, hit_stride=2))
    cached(group, 3)
    assert group.longest_hit(KEYS, 4) == 2


def test_indexing_includes_what_was_copied_into_a_block() -> None:
    """A block that began with a copy can be found at each of its granules once it is written on."""
    group = FullGroup(make_pool(), HALVES)
    table = Table(group.pool.allocate(1) or [])
    assert group.index(table, KEYS, 1, 2) == [0, 1]
    assert table.blocks[0].keys == KEYS[:2]


def test_full_attention_gives_nothing_up_and_releases_its_end_first() -> None:
    """A prefix is found from its start, so its end is evicted first."""
    group = FullGroup(make_pool(4), WHOLE)
    table = cached(group, 3)
    assert group.trim(table, 12) == 0
    group.release(table)
    assert group.pool.allocate(1) == [table.blocks[2]]


def test_a_paged_window_needs_only_what_its_next_query_sees() -> None:
    """Window 8, blocks of 4, cached ``[-, b, c, -, e]`` against keys a b c d e: a hit of 3, its first entry the null block."""
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
    """At 20 tokens over blocks of 4, a query sees ``window - 1`` earlier positions: none with 1, the last block up to 5, two up to 9."""
    group = PagedWindowGroup(make_pool(), WHOLE, window)
    cached(group, 5, without=without)
    assert group.longest_hit(KEYS, 5) == hit


def test_a_paged_window_ends_inside_a_block_too() -> None:
    """Window 3, halves of blocks of 4, cached ``[- -][c -]``: a hit at 6 tokens sees positions 4 and 5, which are copied."""
    group = PagedWindowGroup(make_pool(), HALVES, 3)
    table = cached(group, 3, without="ab")
    assert table.blocks[1].keys == [b"c"]
    assert group.longest_hit(KEYS, 4) == 3
    taken, source = group.take_hit(KEYS, 3)
    assert (taken.blocks, taken.first, source) == ([group.pool.null], 1, table.blocks[1])


def test_a_paged_window_gives_up_what_lies_behind_it() -> None:
    """Window 5 over blocks of 4: the query at 12 sees from 8 on, so two blocks go, oldest first, and go once."""
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
    """The window of a chunk's first token and the chunk, wherever they lie; short sequences hold less."""
    group = PagedWindowGroup(make_pool(), BlockLayout(4, chunk, 4, 1), window)
    assert group.most_blocks(1000) == most
    assert group.most_blocks(3) == 1


def test_a_window_in_place_is_found_where_it_was_kept() -> None:
    """Kept at ``[a b]`` and ``[a b c d]``, keys a b c e hit 2, and the kept block is what the sequence copies from."""
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
    """A second request at the same boundary costs no second copy, but shows what the first is worth."""
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


def test_a_cheap_window_pushes_out_nothing_that_is_worth_more() -> None:
    """A worthy one does."""
    group = InPlaceWindowGroup(make_pool(2), WHOLE, 4)
    block = group.keep(b"a", cheap=False)
    assert block is not None
    group.pool.index_block(block, (b"a",))
    assert group.keep(b"b", cheap=False) is None, "all blocks are in use"
    group.pool.free((block,))
    assert group.keep(b"b", cheap=True) is None
    assert group.keep(b"b", cheap=False) is block


@pytest.mark.parametrize("group", [FullGroup(make_pool(), WHOLE), InPlaceWindowGroup(make_pool(), WHOLE, 4)])
def test_a_hit_that_is_gone_is_an_error(group: FullGroup | InPlaceWindowGroup) -> None:
    """Nothing may be allocated between looking and taking."""
    with pytest.raises(ValueError, match="not in the cache"):
        group.take_hit(KEYS, 1)
