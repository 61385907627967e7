"""Sliding window in place: one block a sequence, whose content moves on with it.

The kernels of Rebellions NPUs append to the block and keep its last ``window`` tokens. What a prefix leaves behind is therefore gone a
chunk later, and vLLM-RBLN switches prefix caching off for such models. Here the block is copied, device to device, at chunk boundaries
worth coming back to; a request that resumes there gets a copy of the copy.
"""

from collections.abc import Sequence

from scheduler_svc.kv.block_pool import Block, BlockKey, BlockPool
from scheduler_svc.kv.groups.base import Grid, Table

# Measured on the traces of tests/bench/kept_windows.py.
_CHEAP_SHARE = 1 / 16


class InPlaceWindowGroup:
    """A table is one block that its sequence alone writes; what the index knows are blocks that nobody writes.

    Attributes:
        pool: working blocks and kept windows, in one memory and one order of eviction.
    """

    def __init__(self, pool: BlockPool, grid: Grid, window: int) -> None:
        """Manages ``pool``, whose blocks hold ``window`` tokens each."""
        self.pool = pool
        pool.cheap_quota = int(pool.num_blocks * _CHEAP_SHARE)
        self._grid = grid
        self._window = window

    def most_blocks(self, num_tokens: int) -> int:  # noqa: ARG002 - the interface's
        """One."""
        return 1

    def blocks_at_start(self, num_known: int, hit_tokens: int) -> int:  # noqa: ARG002 - the interface's
        """One."""
        return 1

    def missing(self, table: Table, num_tokens: int) -> int:  # noqa: ARG002 - the interface's
        """See the interface."""
        return 1 - len(table.blocks)

    def longest_hit(self, keys: Sequence[BlockKey], limit: int) -> int:
        """The last boundary at which the window was kept. Kept at ``[a b]`` and ``[a b c d]``, keys ``a b c e`` hit 2."""
        for hit in range(limit - limit % self._grid.unit, 0, -self._grid.unit):
            if self.pool.lookup(keys[hit - 1]) is not None:
                return hit
        return 0

    def take_hit(self, keys: Sequence[BlockKey], hit: int) -> tuple[Table, Block | None]:
        """Shares nothing: the kept window is copied into the sequence's block."""
        if not hit:
            return Table(), None
        source = self.pool.lookup(keys[hit - 1])
        if source is None:
            raise ValueError("a hit was to be taken that the cache does not have")
        self.pool.touch((source,))
        return Table(), source

    def copied_tokens(self, num_tokens: int) -> int:
        """What of the sequence the window still holds."""
        return min(num_tokens, self._window)

    def reaches_back(self, table: Table, num_computed: int, num_tokens: int) -> bool:  # noqa: ARG002 - the interface's
        """Not at all: the content has moved on with the last token."""
        return num_tokens == num_computed

    def trim(self, table: Table, num_computed: int) -> int:  # noqa: ARG002 - the interface's
        """Nothing: the block slides by itself."""
        return 0

    def index(self, table: Table, keys: Sequence[BlockKey], start: int, end: int) -> list[int]:  # noqa: ARG002 - the interface's
        """Nothing: the table's block is written on. See :meth:`keep`."""
        return []

    def keep(self, key: BlockKey, *, cheap: bool) -> Block | None:
        """A block for a copy of the window, unless the prefix is kept already.

        Cheap ones cost nothing that is not, but for a small part of the pool that is theirs: what a prompt's first repetition needs is
        among the last of them, and must not be crowded out by what was worth keeping long ago.
        """
        kept = self.pool.lookup(key)
        if kept is not None:
            if not cheap:
                # Used again: it is worth more now and goes later.
                self.pool.touch((kept,))
                self.pool.free((kept,))
            return None
        if cheap:
            return self.pool.allocate_for_cheap()
        return next(iter(self.pool.allocate(1) or ()), None)

    def release(self, table: Table) -> None:
        """Frees the block; its content is nobody's."""
        self.pool.free(table.blocks)
