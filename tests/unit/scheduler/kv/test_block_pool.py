"""The block pool, case by case; tests/property covers random sequences of operations."""

import pytest

from scheduler_svc.kv.block_pool import BlockPool
from tests.support.scheduler.factories import make_pool


def test_a_freed_cached_block_can_be_revived_until_it_is_allocated() -> None:
    """`touch` takes the block out of the middle of the free list."""
    pool = make_pool(4)
    blocks = pool.allocate(3) or []
    pool.index_block(blocks[1], (b"k",))
    pool.free(blocks)
    pool.touch([blocks[1]])
    assert pool.lookup(b"k") is blocks[1]
    assert {block.block_id for block in pool.allocate(2) or []} == {1, 3}


def test_the_least_recently_freed_block_is_evicted_first_and_reported() -> None:
    """`on_evict` is called with the evicted key."""
    evicted: list[bytes] = []
    pool = BlockPool(3, on_evict=evicted.append)
    first, second = pool.allocate(2) or []
    pool.index_block(first, (b"first",))
    pool.index_block(second, (b"second",))
    pool.free([second, first])
    pool.allocate(1)
    assert evicted == [b"second"]
    assert pool.lookup(b"first") is first


def test_equal_content_outlives_its_first_block() -> None:
    """Two requests computed a prefix at once: after one block is evicted, the other still has it."""
    evicted: list[bytes] = []
    pool = BlockPool(3, on_evict=evicted.append)
    first, second = pool.allocate(2) or []
    assert pool.index_block(first, (b"k",)) == [b"k"]
    assert pool.index_block(second, (b"k",)) == []
    pool.free([first, second])
    pool.allocate(1)
    assert pool.lookup(b"k") is second
    assert evicted == []
    pool.allocate(1)
    assert pool.lookup(b"k") is None
    assert evicted == [b"k"]
    pool.check_integrity()


def test_a_block_can_be_found_under_each_prefix_that_ends_in_it() -> None:
    """Keys are added one by one and evicted together."""
    pool = make_pool(2)
    (block,) = pool.allocate(1) or [pool.null]
    assert pool.index_block(block, (b"a",)) == [b"a"]
    assert pool.index_block(block, (b"ab", b"abc")) == [b"ab", b"abc"]
    assert {pool.lookup(key) for key in (b"a", b"ab", b"abc")} == {block}
    pool.free([block])
    pool.allocate(1)
    assert [pool.lookup(key) for key in (b"a", b"ab", b"abc")] == [None] * 3
    assert pool.num_evicted == 1


def test_blocks_are_allocated_by_the_worth_of_their_content() -> None:
    """Blocks without content first, then cheap content, then the least recently used."""
    pool = make_pool(5)
    old, cheap, young, empty = pool.allocate(4) or []
    pool.index_block(old, (b"old",))
    pool.index_block(cheap, (b"cheap",), cheap=True)
    pool.index_block(young, (b"young",))
    pool.free([old, cheap, young, empty])
    assert pool.allocate(4) == [empty, cheap, old, young]


def test_cheap_content_evicts_only_cheap_content() -> None:
    """Cheap content is stored in empty blocks or in place of other cheap content."""
    pool = make_pool(3)
    cheap, worthy = pool.allocate(2) or []
    pool.index_block(cheap, (b"cheap",), cheap=True)
    pool.index_block(worthy, (b"worthy",))
    pool.free([cheap, worthy])
    assert pool.allocate_for_cheap() is cheap
    assert pool.allocate_for_cheap() is None
    assert pool.lookup(b"worthy") is worthy


def test_a_hit_makes_cheap_content_valuable() -> None:
    """Content with a hit is no longer cheap."""
    pool = make_pool(2)
    (block,) = pool.allocate(1) or [pool.null]
    pool.index_block(block, (b"k",), cheap=True)
    pool.free([block])
    pool.touch([block])
    pool.free([block])
    assert pool.allocate_for_cheap() is None


def test_a_double_free_is_refused() -> None:
    """A double free names the block instead of corrupting the list."""
    pool = make_pool()
    blocks = pool.allocate(1) or []
    pool.free(blocks)
    with pytest.raises(ValueError, match=r"block 1 is freed more often"):
        pool.free(blocks)


@pytest.mark.parametrize("count", [-1, 0, 1])
def test_a_pool_needs_a_block_to_allocate(count: int) -> None:
    """A pool of only the null block is refused."""
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BlockPool(count)


def test_check_integrity_notices_a_wrong_reference_count() -> None:
    """A free block with references is an error."""
    pool = make_pool()
    block = (pool.allocate(1) or [])[0]
    pool.free([block])
    block.ref_count = 1
    with pytest.raises(RuntimeError, match="block 1: 1 references"):
        pool.check_integrity()
