"""The block pool, case by case; tests/property covers random sequences of operations."""

import pytest

from scheduler_svc.kv.block_pool import BlockPool


def test_a_double_free_is_refused() -> None:
    """A double free names the block instead of corrupting the list."""
    pool = BlockPool(9)
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
    pool = BlockPool(9)
    block = (pool.allocate(1) or [])[0]
    pool.free([block])
    block.ref_count = 1
    with pytest.raises(RuntimeError, match="block 1: 1 references"):
        pool.check_integrity()
