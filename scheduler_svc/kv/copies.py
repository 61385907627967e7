"""Block copies on their way: decided here and now, run by the device with the plan that carries them, settled when that plan was run."""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_svc.kv.block_pool import Block, BlockKey, BlockPool
from scheduler_svc.replica.step_plan import BlockCopy
from scheduler_svc.requests.request import Request


@dataclass(slots=True, eq=False)
class Copy:
    """A copy on its way.

    Attributes:
        order: what the worker is told.
        held: the block that is referenced for the copy alone: a request's source, a kept window's target.
        era: resets of the cache before the copy was decided.
        owner: request that resumes from the target; None for kept windows.
        key: what the target can be found under once it is written; None if it belongs to a request.
        cheap: see ``Block``.
    """

    order: BlockCopy
    held: Block
    era: int
    owner: Request | None = None
    key: BlockKey | None = None
    cheap: bool = False


class Copies:
    """Copies that one plan carries; opaque to the scheduler, which hands them back when the plan was run."""

    __slots__ = ("entries",)

    def __init__(self, entries: list[Copy]) -> None:
        """Wraps ``entries``."""
        self.entries = entries

    @property
    def orders(self) -> tuple[BlockCopy, ...]:
        """What the worker is told, in order."""
        return tuple(entry.order for entry in self.entries)

    @property
    def owners(self) -> list[Request]:
        """Requests that go on from what is copied."""
        return [entry.owner for entry in self.entries if entry.owner is not None]


class CopyQueue:
    """Copies that no plan carries yet, in the order in which they were decided.

    A copy holds a reference on one block. Who takes it back before its plan is sent gives the reference back at once.
    """

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        """Of the groups whose pools these are, by group id."""
        self._pools = pools
        self.entries: list[Copy] = []

    def __bool__(self) -> bool:
        """Whether the next plan has to carry any."""
        return bool(self.entries)

    def add(self, entry: Copy) -> None:
        """Has the next plan carry a copy, whose ``held`` block the caller has referenced."""
        self.entries.append(entry)

    def take(self) -> Copies | None:
        """All of them, for a plan that is sent now."""
        if not self.entries:
            return None
        entries, self.entries = self.entries, []
        return Copies(entries)

    def withdraw(self, owner: Request) -> None:
        """Takes a request's copies back: nobody needs them any more, except a fork that copies on from there in the same plan."""
        read = {(entry.order.group_id, entry.order.source_block) for entry in self.entries}
        for entry in [entry for entry in self.entries if entry.owner is owner]:
            if (entry.order.group_id, entry.order.target_block) not in read:
                self._drop(entry)

    def drop_windows(self) -> bool:
        """Takes back the windows that were to be kept; whether there were any."""
        dropped = [entry for entry in self.entries if entry.owner is None]
        for entry in dropped:
            self._drop(entry)
        return bool(dropped)

    def waits_for(self, request: Request) -> bool:
        """Whether what the request goes on from is not copied yet."""
        return any(entry.owner is request for entry in self.entries)

    def _drop(self, entry: Copy) -> None:
        self.entries.remove(entry)
        self._pools[entry.order.group_id].free((entry.held,))
