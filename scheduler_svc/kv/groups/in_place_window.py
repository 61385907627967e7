"""Sliding window in place: one block per sequence, with content that slides along.

The kernels of Rebellions NPUs append to the block and keep its last ``window`` tokens. One chunk later the
prefix's window is overwritten, and vLLM-RBLN therefore disables prefix caching for such models. Here the
block is copied, device to device, at the chunk boundaries worth resuming from. A request that resumes there
gets a copy of that copy.
"""

from collections.abc import Sequence
from typing import ClassVar

from scheduler_svc.kv.block_pool import Block, BlockKey, BlockPool
from scheduler_svc.kv.groups.base import BlockLayout, Table

# Measured on the traces of tests/bench/kept_windows.py.
_CHEAP_SHARE = 1 / 16


class InPlaceWindowGroup:
    """A table is one block that only its sequence writes. Indexed blocks are never written."""

    paged: ClassVar[bool] = False

    def __init__(self, pool: BlockPool, layout: BlockLayout, window: int) -> None:
        """Manages ``pool``, which has both working blocks and kept windows of ``window`` tokens each."""
        self.pool = pool
        pool.cheap_quota = int(pool.num_blocks * _CHEAP_SHARE)
        self._layout = layout
        self._window = window

    def most_blocks(self, num_tokens: int) -> int:  # noqa: ARG002 - part of the interface
        """Returns 1."""
        return 1

    def blocks_at_start(self, num_known: int, hit_tokens: int) -> int:  # noqa: ARG002 - part of the interface
        """Returns 1."""
        return 1

    def missing(self, table: Table, num_tokens: int) -> int:  # noqa: ARG002 - part of the interface
        """See :class:`KvGroupManager`."""
        return 1 - len(table.blocks)

    def longest_hit(self, keys: Sequence[BlockKey], limit: int) -> int:
        """Returns the last boundary with a kept window; with ``ab`` and ``abcd`` kept, ``abce`` hits 2."""
        stride = self._layout.hit_stride
        for hit in range(limit - limit % stride, 0, -stride):
            if self.pool.lookup(keys[hit - 1]) is not None:
                return hit
        return 0

    def take_hit(self, keys: Sequence[BlockKey], hit: int) -> tuple[Table, Block | None]:
        """Shares nothing: the kept window is copied into the sequence's block."""
        if not hit:
            return Table(), None
        source = self.pool.lookup(keys[hit - 1])
        if source is None:
            raise ValueError("cannot take a prefix hit that is not in the cache")
        self.pool.touch((source,))
        return Table(), source

    def copied_tokens(self, num_tokens: int) -> int:
        """Returns how many of the sequence's tokens the window still holds."""
        return min(num_tokens, self._window)

    def reaches_back(self, table: Table, num_computed: int, num_tokens: int) -> bool:  # noqa: ARG002 - part of the interface
        """Returns False for every earlier length: the last token overwrote the window of the one before."""
        return num_tokens == num_computed

    def trim(self, table: Table, num_computed: int) -> int:  # noqa: ARG002 - part of the interface
        """Frees nothing: the block slides in place."""
        return 0

    def index(self, table: Table, keys: Sequence[BlockKey], start: int, end: int) -> list[int]:  # noqa: ARG002 - part of the interface
        """Indexes nothing: the table's block will be overwritten. See :meth:`keep`."""
        return []

    def keep(self, key: BlockKey, *, cheap: bool) -> Block | None:
        """Returns a block for a copy of the window, unless the prefix is kept already.

        Cheap windows replace only cheap windows, plus a small share of the pool that is reserved for them.
        That share protects the windows that a prompt's first repetition needs from older, more valuable ones.
        """
        kept = self.pool.lookup(key)
        if kept is not None:
            if not cheap:
                # The prefix was used again: raise its worth and make it the last to be evicted.
                self.pool.touch((kept,))
                self.pool.free((kept,))
            return None
        if cheap:
            return self.pool.allocate_for_cheap()
        return next(iter(self.pool.allocate(1) or ()), None)

    def release(self, table: Table) -> None:
        """Frees the block; no other sequence can use its content."""
        self.pool.free(table.blocks)
