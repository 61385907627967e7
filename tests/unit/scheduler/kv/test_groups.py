"""KV group managers one by one: the hits they find, the blocks they take and free."""

import pytest

from scheduler_svc.kv.block_pool import BlockPool
from scheduler_svc.kv.groups import BlockLayout, FullGroup, InPlaceWindowGroup, PagedWindowGroup, Table

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


def test_indexing_includes_copied_content() -> None:
    """A block that began as a copy is found at each of its hash blocks once it is written on."""
    group = FullGroup(BlockPool(9), HALVES)
    table = Table(group.pool.allocate(1) or [])
    assert group.index(table, KEYS, 1, 2) == [0, 1]
    assert table.blocks[0].keys == KEYS[:2]


def test_a_paged_window_hit_may_end_inside_a_block() -> None:
    """Window 3, cached ``[- -][c -]``: a hit at 6 tokens sees positions 4 and 5, which are copied."""
    group = PagedWindowGroup(BlockPool(9), HALVES, 3)
    table = cached(group, 3, without="ab")
    assert table.blocks[1].keys == [b"c"]
    assert group.longest_hit(KEYS, 4) == 3
    taken, source = group.take_hit(KEYS, 3)
    assert (taken.blocks, taken.first, source) == ([group.pool.null], 1, table.blocks[1])


@pytest.mark.parametrize(("window", "chunk", "most"), [(4, 4, 3), (8, 4, 4), (1, 4, 2), (5, 8, 4)])
def test_a_paged_window_holds_a_bounded_number_of_blocks(window: int, chunk: int, most: int) -> None:
    """It covers the window of a chunk's first token and the chunk; short sequences hold less."""
    group = PagedWindowGroup(BlockPool(9), BlockLayout(4, chunk, 4, 1), window)
    assert group.most_blocks(1000) == most
    assert group.most_blocks(3) == 1


def test_a_window_is_kept_once() -> None:
    """A second request at the same boundary needs no second copy, but raises the worth of the first."""
    group = InPlaceWindowGroup(BlockPool(2), WHOLE, 4)
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


@pytest.mark.parametrize(
    "group", [FullGroup(BlockPool(9), WHOLE), InPlaceWindowGroup(BlockPool(9), WHOLE, 4)]
)
def test_a_hit_that_is_gone_is_an_error(group: FullGroup | InPlaceWindowGroup) -> None:
    """Nothing may be allocated between looking up a hit and taking it."""
    with pytest.raises(ValueError, match="not in the cache"):
        group.take_hit(KEYS, 1)
