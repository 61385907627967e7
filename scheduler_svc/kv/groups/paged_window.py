"""Sliding window over append-only blocks: those behind the window are given up."""

from collections.abc import Sequence

from scheduler_svc.kv.block_pool import Block, BlockKey, BlockPool
from scheduler_svc.kv.groups.base import Grid, Table
from scheduler_svc.kv.groups.full import FullGroup


class PagedWindowGroup(FullGroup):
    """Blocks lie as with full attention, but a query at position p reads only positions above ``p - window``.

    So a sequence holds a bounded number of blocks, and a hit needs only the blocks that the next query reads.
    """

    def __init__(self, pool: BlockPool, grid: Grid, window: int) -> None:
        """Manages ``pool`` for layers that see ``window`` tokens."""
        super().__init__(pool, grid)
        self._window = window

    def most_blocks(self, num_tokens: int) -> int:
        """The window of a chunk's first token and the chunk, wherever they lie relative to blocks."""
        grid = self._grid
        return min(
            super().most_blocks(num_tokens), -(-(self._window - 1 + grid.chunk) // grid.block_size) + 1
        )

    def blocks_at_start(self, num_known: int, hit_tokens: int) -> int:
        """Up to the end of the first chunk; the others grow as blocks fall behind the window."""
        return super().most_blocks(min(num_known + 1, hit_tokens + self._grid.chunk))

    def missing(self, table: Table, num_tokens: int) -> int:
        """See the interface; entries behind the window count as there."""
        return max(0, super().most_blocks(num_tokens) - len(table.blocks))

    def longest_hit(self, keys: Sequence[BlockKey], limit: int) -> int:
        """Searches from the right for a length whose window is cached; what lies before the window need not be.

        Window 8, blocks of 4, one granule each: a hit of length n needs the positions from ``4n - 7`` on, its last two blocks.
        Cached ``[-, b, c, -, e]`` against keys ``a b c d e`` is a hit of 3.
        """
        grid, per_block, lookup = self._grid, self._grid.per_block, self.pool.lookup
        hit = limit - limit % grid.unit
        while hit > 0:
            if hit % per_block and lookup(keys[hit - 1]) is None:
                hit -= grid.unit
                continue
            first = self._first_needed(hit * grid.granule)
            missing = next(
                (i for i in range(hit // per_block - 1, first - 1, -1) if lookup(keys[(i + 1) * per_block - 1]) is None),
                None,
            )  # fmt: skip
            if missing is None:
                return hit
            # Every shorter hit that reaches beyond that block needs it too; the next candidate ends inside it or before it.
            hit = (missing + 1) * per_block - 1
            hit -= hit % grid.unit
        return 0

    def take_hit(self, keys: Sequence[BlockKey], hit: int) -> tuple[Table, Block | None]:
        """See the interface; entries before the window are the null block."""
        per_block = self._grid.per_block
        num_full = hit // per_block
        first = min(self._first_needed(hit * self._grid.granule), num_full)
        blocks = [self._found(keys[(i + 1) * per_block - 1]) for i in range(first, num_full)]
        source = self._found(keys[hit - 1]) if hit % per_block else None
        self.pool.touch(blocks)
        if source is not None:
            self.pool.touch((source,))
        return Table([self.pool.null] * first + blocks, first), source

    def reaches_back(self, table: Table, num_computed: int, num_tokens: int) -> bool:
        """Until the first block of that query's window was given up."""
        return num_tokens <= num_computed and table.first <= self._first_needed(num_tokens)

    def trim(self, table: Table, num_computed: int) -> int:
        """Frees what lies behind the window of the query at ``num_computed``, oldest first, so that it is evicted first."""
        first = min(self._first_needed(num_computed), len(table.blocks))
        count = first - table.first
        if count <= 0:
            return 0
        self.pool.free(table.blocks[table.first : first])
        table.blocks[table.first : first] = [self.pool.null] * count
        table.first = first
        return count

    def _first_needed(self, num_computed: int) -> int:
        """The block of the oldest token that a query at position ``num_computed`` sees."""
        return max(0, num_computed - self._window + 1) // self._grid.block_size
