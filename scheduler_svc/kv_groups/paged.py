"""Paged blocks that keep every token: full attention, and windows whose kernel reads append-only blocks."""

from scheduler_svc.block_pool import Block, BlockKey, BlockPool


class PagedGroup:
    """Block i of a table holds tokens ``[i * block_size, (i + 1) * block_size)``.

    Correct for sliding windows too, where the kernel masks what lies behind the window; it then keeps more than it must.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        """Manages ``pool`` in blocks of ``block_size`` tokens."""
        self.pool = pool
        self._block_size = block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """``ceil(num_tokens / block_size)``."""
        return -(-num_tokens // self._block_size)

    def longest_hit(self, keys: list[BlockKey], max_blocks: int) -> int:
        """Full attention reads all earlier tokens, so a hit ends at the first block that is missing.

        Cached ``[a, b, -, d]`` against keys ``[a, b, c, d]`` is a hit of 2.
        """
        for index in range(min(len(keys), max_blocks)):
            if self.pool.lookup(keys[index]) is None:
                return index
        return min(len(keys), max_blocks)

    def take_hit(self, keys: list[BlockKey], num_blocks: int) -> list[Block]:
        """References the hit's blocks."""
        found = [block for key in keys[:num_blocks] if (block := self.pool.lookup(key)) is not None]
        if len(found) != num_blocks:
            raise ValueError(f"{num_blocks} blocks were to be taken from the cache, it has {len(found)}")
        self.pool.touch(found)
        return found

    def index(self, table: list[Block], keys: list[BlockKey], first: int) -> None:
        """Indexes each block under its key; content that is known already stays with the block that has it."""
        for position in range(first, len(keys)):
            self.pool.index_block(table[position], keys[position])

    def release(self, table: list[Block]) -> None:
        """Frees the last block first: a cached prefix is found from its start, so its end may be evicted first."""
        self.pool.free(reversed(table))
