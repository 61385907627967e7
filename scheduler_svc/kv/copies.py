"""Pending block copies: decided by the cache, run by the device with a plan, settled afterwards."""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_svc.kv.block_pool import Block, BlockKey, BlockPool
from scheduler_svc.kv.sequence import SequenceKv


@dataclass(slots=True, eq=False)
class PendingCopy:
    """A pending device-to-device copy of a block's leading tokens."""

    group_id: int
    """KV group of both blocks."""
    source: Block
    target: Block
    num_tokens: int
    """Leading tokens to copy."""
    held: Block
    """The block referenced by the copy itself: the source of a sequence's copy, the target of a kept
    window."""
    epoch: int
    """Epoch of the prefix cache when the copy was decided."""
    sequence: SequenceKv | None = None
    """The sequence that resumes from the target; None for kept windows."""
    key: BlockKey | None = None
    """Prefix under which a kept window can be found once it is written; None for a sequence's copy."""
    cheap: bool = False
    """Whether the kept window is evicted before other content; see `Block`."""


class CopyQueue:
    """Copies not yet carried by a plan, in the order of their decisions.

    Each copy holds a reference on a block. A copy withdrawn before its plan is sent returns it at once.
    """

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        """Starts empty; ``pools`` are the block pools by group id."""
        self._pools = pools
        self.entries: list[PendingCopy] = []

    def __bool__(self) -> bool:
        """Whether copies wait for the next plan."""
        return bool(self.entries)

    def add(self, copy: PendingCopy) -> None:
        """Queues a copy for the next plan. The caller referenced its ``held`` block."""
        self.entries.append(copy)

    def take(self) -> tuple[PendingCopy, ...]:
        """Removes and returns all copies, for a plan about to be sent."""
        if not self.entries:
            return ()
        entries, self.entries = self.entries, []
        return tuple(entries)

    def withdraw(self, sequence: SequenceKv) -> None:
        """Drops the copies of a sequence, except those read by a fork in the same plan."""
        read = {copy.source for copy in self.entries}
        for copy in [copy for copy in self.entries if copy.sequence is sequence]:
            if copy.target not in read:
                self._drop(copy)

    def drop_windows(self) -> bool:
        """Drops all copies that only keep windows; returns whether there were any."""
        dropped = [copy for copy in self.entries if copy.sequence is None]
        for copy in dropped:
            self._drop(copy)
        return bool(dropped)

    def waits_for(self, sequence: SequenceKv) -> bool:
        """Whether content that the sequence resumes from is not copied yet."""
        return any(copy.sequence is sequence for copy in self.entries)

    def _drop(self, copy: PendingCopy) -> None:
        self.entries.remove(copy)
        self._pools[copy.group_id].free((copy.held,))
