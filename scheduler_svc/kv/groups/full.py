"""Full attention: paged blocks that keep every token."""

from collections.abc import Sequence
from typing import ClassVar

from scheduler_svc.kv.block_pool import Block, BlockKey, BlockPool
from scheduler_svc.kv.groups.base import BlockLayout, Table


class FullGroup:
    """Block i of a table holds tokens ``[i * block_size, (i + 1) * block_size)``."""

    paged: ClassVar[bool] = True

    def __init__(self, pool: BlockPool, layout: BlockLayout) -> None:
        """Manages the blocks of ``pool``."""
        self.pool = pool
        self._layout = layout

    def most_blocks(self, num_tokens: int) -> int:
        """Returns ``ceil(num_tokens / block_size)``."""
        return -(-num_tokens // self._layout.block_size)

    def blocks_at_start(self, num_known: int, hit_tokens: int) -> int:  # noqa: ARG002 - part of the interface
        """Covers all known tokens and the next one, so that a request's first token cannot preempt it."""
        return self.most_blocks(num_known + 1)

    def missing(self, table: Table, num_tokens: int) -> int:
        """See :class:`KvGroupManager`."""
        return max(0, self.most_blocks(num_tokens) - len(table.blocks))

    def longest_hit(self, keys: Sequence[BlockKey], limit: int) -> int:
        """Ends a hit at the first missing hash block, because full attention reads all earlier tokens.

        Two hash blocks per block, cached ``[a b][c -]``: keys ``a b c d`` hit 3; the third is copied out of
        the second block.
        """
        per_block, lookup = self._layout.hash_blocks_per_block, self.pool.lookup
        hit = 0
        # A key stands for everything before it in its block, so each whole block needs one lookup.
        while hit + per_block <= limit and lookup(keys[hit + per_block - 1]) is not None:
            hit += per_block
        if per_block > 1:
            for end in range(min(hit + per_block - 1, limit), hit, -1):
                if lookup(keys[end - 1]) is not None:
                    hit = end
                    break
        return hit - hit % self._layout.hit_stride

    def take_hit(self, keys: Sequence[BlockKey], hit: int) -> tuple[Table, Block | None]:
        """See :class:`KvGroupManager`."""
        per_block = self._layout.hash_blocks_per_block
        blocks = [self._found(keys[end - 1]) for end in range(per_block, hit + 1, per_block)]
        source = self._found(keys[hit - 1]) if hit % per_block else None
        self.pool.touch(blocks)
        if source is not None:
            self.pool.touch((source,))
        return Table(blocks), source

    def copied_tokens(self, num_tokens: int) -> int:
        """Returns the number of tokens in the last, partly filled block."""
        return num_tokens % self._layout.block_size

    def reaches_back(self, table: Table, num_computed: int, num_tokens: int) -> bool:  # noqa: ARG002 - part of the interface
        """Returns True for every computed length: nothing is ever given up."""
        return num_tokens <= num_computed

    def trim(self, table: Table, num_computed: int) -> int:  # noqa: ARG002 - part of the interface
        """Frees nothing: later queries read every token."""
        return 0

    def index(self, table: Table, keys: Sequence[BlockKey], start: int, end: int) -> list[int]:
        """Indexes the keys that each block lacks, including those of content copied into it at admission."""
        per_block = self._layout.hash_blocks_per_block
        new: list[int] = []
        for position in range(start // per_block, -(-end // per_block)):
            block = table.blocks[position]
            if block is self.pool.null:
                continue
            first, last = position * per_block + len(block.keys), min(end, (position + 1) * per_block)
            if first < last:
                # A partly filled block can only be copied; it is evicted before blocks that can be shared
                # whole.
                partial = last < (position + 1) * per_block
                fresh = set(self.pool.index_block(block, keys[first:last], cheap=partial))
                new += [index for index in range(first, last) if keys[index] in fresh]
        return new

    def keep(self, key: BlockKey, *, cheap: bool) -> Block | None:  # noqa: ARG002 - part of the interface
        """Returns None: blocks are never overwritten."""
        return None

    def release(self, table: Table) -> None:
        """Frees the last block first: a prefix is found from its start, so its end is evicted first."""
        self.pool.free(reversed(table.live))

    def _found(self, key: BlockKey) -> Block:
        block = self.pool.lookup(key)
        if block is None:
            raise ValueError("cannot take a prefix hit that is not in the cache")
        return block
