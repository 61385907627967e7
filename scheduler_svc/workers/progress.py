"""Notices a replica whose plans compute nothing while requests run on it, and what becomes of it."""

import enum
from collections.abc import Callable
from time import monotonic
from typing import Final

from protos.errors import Unavailable

MOST_IN_A_ROW: Final = 32
"""Results in a row that may compute nothing. A pipeline that starts over has one more than it has stages."""

LONGEST_S: Final = 0.5
"""Seconds from the first such result to the last, or for which running requests may have no plan."""

# A few results without work may surround one slow step.
_FEWEST = 4


class Stall(enum.Enum):
    """What a replica does instead of computing; the value is its name in logs and metrics."""

    VOID = "void"
    """Plans whose work does not run."""
    EMPTY = "empty"
    """Plans without work."""
    UNPLANNED = "unplanned"
    """Nothing: its scheduler makes no plan."""


class Stalled(Unavailable):
    """A replica computed nothing again after it had started over."""


class ProgressWatch:
    """Watches one replica.

    Only results count, so a step that takes long is no stall; its time limit is another matter. The first
    stall in a row makes the replica start over, and the second one costs it its registration.
    """

    def __init__(
        self, on_change: Callable[[Stall | None], object], clock: Callable[[], float] = monotonic
    ) -> None:
        """Starts watching.

        Args:
            on_change: called with each stall, and with None once the replica computes again.
            clock: monotonic seconds.
        """
        self._on_change = on_change
        self._clock = clock
        self._count = 0
        self._since_s = 0.0
        self._stalled = False

    def computed(self) -> None:
        """Notes a result of a step that ran or failed, or that no request runs."""
        self._count = 0
        if self._stalled:
            self._stalled = False
            self._on_change(None)

    def idled(self, stall: Stall) -> bool:
        """Notes that nothing was computed while requests ran.

        Returns:
            Whether the replica must start over.

        Raises:
            Stalled: it has started over already, and has computed nothing since.
        """
        now = self._clock()
        if not self._count:
            self._since_s = now
        self._count += 1
        for_s = now - self._since_s
        few = self._count < (2 if stall is Stall.UNPLANNED else _FEWEST)
        if self._count < MOST_IN_A_ROW and (few or for_s < LONGEST_S):
            return False
        count, self._count = self._count, 0
        self._on_change(stall)
        if self._stalled:
            raise Stalled(
                f"nothing was computed in {count} turns ({stall.value}) while requests ran, and as many before;"
                " the worker is given up"
            )
        self._stalled = True
        return True
