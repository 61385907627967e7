"""Decides which contents of in-place windows are worth a copy."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal, Protocol

from scheduler_svc.kv.block_pool import BlockKey

Worth = Literal["much", "little", "nothing"]
"""*much*: may evict older content; *little*: only while there is room; *nothing*: no copy."""


class KeepPolicy(Protocol):
    """Values windows at the chunk boundaries of prompts."""

    def observe(self, keys: Sequence[BlockKey], boundaries: Sequence[int]) -> int:
        """Records the prompt of an admitted sequence.

        Args:
            keys: the prompt's prefix keys.
            boundaries: the hash block counts at which its chunks end.

        Returns:
            The boundary at which the prompt diverges from earlier ones; 0 if it shares nothing.
        """

    def worth(self, boundary: int, last: int, junction: int) -> Worth:
        """Returns the worth of the window at ``boundary`` of a prompt with these other boundaries."""


class KeepJunctions:
    """Keeps the end of every prompt, where a conversation continues, and boundaries where prompts diverge.

    The shared part of two prompts is known only when the second arrives. Every other boundary is therefore
    kept, too, as long as that evicts nothing better. Once a second prompt diverges at a boundary, it is worth
    as much as an end.
    """

    def __init__(self, max_seen: int = 65_536) -> None:
        """Remembers the ``max_seen`` most recent boundaries of prompts."""
        self._seen: OrderedDict[BlockKey, None] = OrderedDict()
        self._max_seen = max_seen

    def observe(self, keys: Sequence[BlockKey], boundaries: Sequence[int]) -> int:
        """See :class:`KeepPolicy`."""
        junction = 0
        for boundary in boundaries:
            key = keys[boundary - 1]
            if key in self._seen:
                junction = boundary
                self._seen.move_to_end(key)
            else:
                self._seen[key] = None
        while len(self._seen) > self._max_seen:
            self._seen.popitem(last=False)
        return junction

    def worth(self, boundary: int, last: int, junction: int) -> Worth:
        """See :class:`KeepPolicy`."""
        return "much" if boundary in (last, junction) else "little"


class KeepEnds(KeepJunctions):
    """Keeps only ends of prompts and junctions: fewer copies, but the first repetition of a prefix misses."""

    def worth(self, boundary: int, last: int, junction: int) -> Worth:
        """See :class:`KeepPolicy`."""
        return "much" if boundary in (last, junction) else "nothing"
