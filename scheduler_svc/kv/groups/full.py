"""Full attention: paged blocks that keep every token."""

from collections.abc import Sequence

from scheduler_svc.kv.block_pool import Block, BlockKey, BlockPool
from scheduler_svc.kv.groups.base import Grid, Table


class FullGroup:
    """Block i of a table holds tokens ``[i * block_size, (i + 1) * block_size)``.

    Attributes:
        pool: the group's blocks.
    """

    def __init__(self, pool: BlockPool, grid: Grid) -> None:
        """Manages ``pool``."""
        self.pool = pool
        self._grid = grid

    def most_blocks(self, num_tokens: int) -> int:
        """``ceil(num_tokens / block_size)``."""
        return -(-num_tokens // self._grid.block_size)

    def blocks_at_start(self, num_known: int, hit_tokens: int) -> int:  # noqa: ARG002 - the interface's
        """All known tokens and the next one: otherwise a request could be admitted only to be preempted by its own first token."""
        return self.most_blocks(num_known + 1)

    def missing(self, table: Table, num_tokens: int) -> int:
        """See the interface."""
        return max(0, self.most_blocks(num_tokens) - len(table.blocks))

    def longest_hit(self, keys: Sequence[BlockKey], limit: int) -> int:
        """Full attention reads all earlier tokens, so a hit ends at the first granule that is missing.

        Two granules a block, cached ``[a b][c -]``: keys ``a b c d`` hit 3, of which the third is copied out of the second block.
        """
        per_block, lookup = self._grid.per_block, self.pool.lookup
        hit = 0
        # A key stands for everything before it in its block, so whole blocks need one look each.
        while hit + per_block <= limit and lookup(keys[hit + per_block - 1]) is not None:
            hit += per_block
        if per_block > 1:
            for end in range(min(hit + per_block - 1, limit), hit, -1):
                if lookup(keys[end - 1]) is not None:
                    hit = end
                    break
        return hit - hit % self._grid.unit

    def take_hit(self, keys: Sequence[BlockKey], hit: int) -> tuple[Table, Block | None]:
        """See the interface."""
        per_block = self._grid.per_block
        blocks = [self._found(keys[end - 1]) for end in range(per_block, hit + 1, per_block)]
        source = self._found(keys[hit - 1]) if hit % per_block else None
        self.pool.touch(blocks)
        if source is not None:
            self.pool.touch((source,))
        return Table(blocks), source

    def copied_tokens(self, num_tokens: int) -> int:
        """What the last, partly filled block holds."""
        return num_tokens % self._grid.block_size

    def reaches_back(self, table: Table, num_computed: int, num_tokens: int) -> bool:  # noqa: ARG002 - the interface's
        """As far as one likes."""
        return num_tokens <= num_computed

    def trim(self, table: Table, num_computed: int) -> int:  # noqa: ARG002 - the interface's
        """Nothing: every token is read for ever."""
        return 0

    def index(self, table: Table, keys: Sequence[BlockKey], start: int, end: int) -> list[int]:
        """Indexes what its block does not have yet, which includes what was copied into it before it was written on."""
        per_block = self._grid.per_block
        new: list[int] = []
        for position in range(start // per_block, -(-end // per_block)):
            block = table.blocks[position]
            if block is self.pool.null:
                continue
            first, last = position * per_block + len(block.keys), min(end, (position + 1) * per_block)
            if first < last:
                # A beginning that is only worth a copy goes before blocks that can be shared whole.
                partial = last < (position + 1) * per_block
                fresh = set(self.pool.index_block(block, keys[first:last], cheap=partial))
                new += [index for index in range(first, last) if keys[index] in fresh]
        return new

    def keep(self, key: BlockKey, *, cheap: bool) -> Block | None:  # noqa: ARG002 - the interface's
        """Nothing: blocks are never written over."""
        return None

    def release(self, table: Table) -> None:
        """Frees the last block first: a cached prefix is found from its start, so its end may be evicted first."""
        self.pool.free(reversed(table.live))

    def _found(self, key: BlockKey) -> Block:
        block = self.pool.lookup(key)
        if block is None:
            raise ValueError("a hit was to be taken that the cache does not have")
        return block
