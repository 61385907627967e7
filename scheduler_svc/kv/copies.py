"""Pending block copies: decided by the cache, run by the device with a plan, settled afterwards."""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_svc.kv.block_pool import Block, BlockKey, BlockPool
from scheduler_svc.kv.sequence import SequenceKv


@dataclass(slots=True, eq=False)
class PendingCopy:
    """A device-to-device copy of a block's leading tokens that has not been run yet."""

    group_id: int
    """KV group of both blocks."""
    source: Block
    target: Block
    num_tokens: int
    """Leading tokens to copy."""
    held: Block
    """The block that the copy itself references: the source of a sequence's copy, the target of a kept
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
    """Copies that no plan carries yet, in the order in which they were decided.

    Each copy holds a reference on one block. A copy that is withdrawn before its plan is sent returns it at
    once.
    """

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        """Starts empty; ``pools`` are the block pools by group id."""
        self._pools = pools
        self.entries: list[PendingCopy] = []

    def __bool__(self) -> bool:
        """Whether the next plan has copies to carry."""
        return bool(self.entries)

    def add(self, copy: PendingCopy) -> None:
        """Queues a copy for the next plan. The caller has referenced its ``held`` block."""
        self.entries.append(copy)

    def take(self) -> tuple[PendingCopy, ...]:
        """Removes and returns all copies, for a plan that is sent now."""
        if not self.entries:
            return ()
        entries, self.entries = self.entries, []
        return tuple(entries)

    def withdraw(self, sequence: SequenceKv) -> None:
        """Drops the copies of a sequence, except those that a fork in the same plan reads."""
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
