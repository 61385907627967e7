"""Which contents of an in-place window are worth a copy."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal, Protocol

from scheduler_svc.kv.block_pool import BlockKey

Worth = Literal["much", "little", "nothing"]
"""*much*: may push out older content; *little*: only while there is room; *nothing*: no copy."""


class KeepPolicy(Protocol):
    """Judges the chunk boundaries of prompts."""

    def observe(self, keys: Sequence[BlockKey], boundaries: Sequence[int]) -> int:
        """A request with these keys was admitted; ``boundaries`` are the granule counts at which its chunks end.

        Returns:
            The boundary at which it leaves what was seen before, 0 if it shares nothing.
        """

    def worth(self, boundary: int, last: int, junction: int) -> Worth:
        """What the window at ``boundary`` is worth for a request whose last chunk boundary is ``last``."""


class KeepJunctions:
    """Keeps the end of every prompt, where the next turn of its conversation goes on, and the places where prompts diverge.

    What two prompts share is known only when the second one comes, so every other boundary is kept as well, as long as that pushes out
    nothing better; and a boundary where a second prompt left the path of a first one counts as much as an end from then on.
    """

    def __init__(self, max_seen: int = 65_536) -> None:
        """Remembers the last ``max_seen`` boundaries that prompts had."""
        self._seen: OrderedDict[BlockKey, None] = OrderedDict()
        self._max_seen = max_seen

    def observe(self, keys: Sequence[BlockKey], boundaries: Sequence[int]) -> int:
        """See the interface."""
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
        """See the interface."""
        return "much" if boundary in (last, junction) else "little"


class KeepEnds(KeepJunctions):
    """Keeps the ends of prompts and the junctions, nothing on the off chance: fewer copies, the first repetition of a prefix misses."""

    def worth(self, boundary: int, last: int, junction: int) -> Worth:
        """See the interface."""
        return "much" if boundary in (last, junction) else "nothing"
