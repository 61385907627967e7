"""Sliding window over append-only blocks: blocks behind the window are freed."""

from collections.abc import Sequence

from scheduler_svc.kv.block_pool import Block, BlockKey, BlockPool
from scheduler_svc.kv.groups.base import BlockLayout, Table
from scheduler_svc.kv.groups.full import FullGroup


class PagedWindowGroup(FullGroup):
    """Blocks lie as with full attention, but a query at position p reads only positions above ``p - window``.

    A sequence therefore holds a bounded number of blocks, and a hit needs only the blocks that the next query
    reads.
    """

    def __init__(self, pool: BlockPool, layout: BlockLayout, window: int) -> None:
        """Manages ``pool`` for layers that see ``window`` tokens."""
        super().__init__(pool, layout)
        self._window = window

    def most_blocks(self, num_tokens: int) -> int:
        """Covers the window of a chunk's first token and the chunk, for the worst alignment with blocks."""
        layout = self._layout
        window_and_chunk = -(-(self._window - 1 + layout.chunk) // layout.block_size) + 1
        return min(super().most_blocks(num_tokens), window_and_chunk)

    def blocks_at_start(self, num_known: int, hit_tokens: int) -> int:
        """Covers the first chunk; later blocks are added as earlier ones fall behind the window."""
        return super().most_blocks(min(num_known + 1, hit_tokens + self._layout.chunk))

    def missing(self, table: Table, num_tokens: int) -> int:
        """Counts the entries behind the window as present."""
        return max(0, super().most_blocks(num_tokens) - len(table.blocks))

    def longest_hit(self, keys: Sequence[BlockKey], limit: int) -> int:
        """Searches from the right for a length with a cached window; blocks before the window may be missing.

        Window 8, blocks of 4, one hash block each: a hit of length n needs the positions from ``4n - 7`` on,
        its last two blocks. Cached ``[-, b, c, -, e]`` against keys ``a b c d e`` is a hit of 3.
        """
        layout, per_block, lookup = self._layout, self._layout.hash_blocks_per_block, self.pool.lookup
        hit = limit - limit % layout.hit_stride
        while hit > 0:
            if hit % per_block and lookup(keys[hit - 1]) is None:
                hit -= layout.hit_stride
                continue
            first = self._first_needed(hit * layout.hash_block_size)
            missing = next(
                (i for i in range(hit // per_block - 1, first - 1, -1) if lookup(keys[(i + 1) * per_block - 1]) is None),
                None,
            )  # fmt: skip
            if missing is None:
                return hit
            # Every shorter hit that reaches beyond the missing block needs it too: the next candidate ends
            # before its end.
            hit = (missing + 1) * per_block - 1
            hit -= hit % layout.hit_stride
        return 0

    def take_hit(self, keys: Sequence[BlockKey], hit: int) -> tuple[Table, Block | None]:
        """Puts the null block in place of blocks before the window."""
        per_block = self._layout.hash_blocks_per_block
        num_full = hit // per_block
        first = min(self._first_needed(hit * self._layout.hash_block_size), num_full)
        blocks = [self._found(keys[(i + 1) * per_block - 1]) for i in range(first, num_full)]
        source = self._found(keys[hit - 1]) if hit % per_block else None
        self.pool.touch(blocks)
        if source is not None:
            self.pool.touch((source,))
        return Table([self.pool.null] * first + blocks, first), source

    def reaches_back(self, table: Table, num_computed: int, num_tokens: int) -> bool:
        """Returns True until the first block of that query's window is freed."""
        return num_tokens <= num_computed and table.first <= self._first_needed(num_tokens)

    def trim(self, table: Table, num_computed: int) -> int:
        """Frees the blocks behind the window of the query at ``num_computed``, the oldest first."""
        first = min(self._first_needed(num_computed), len(table.blocks))
        count = first - table.first
        if count <= 0:
            return 0
        self.pool.free(table.blocks[table.first : first])
        table.blocks[table.first : first] = [self.pool.null] * count
        table.first = first
        return count

    def _first_needed(self, num_computed: int) -> int:
        """Returns the block of the oldest token that a query at position ``num_computed`` sees."""
        return max(0, num_computed - self._window + 1) // self._layout.block_size
