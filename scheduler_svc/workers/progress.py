"""Detects stalled replicas: their plans compute nothing while requests run."""

import enum
from collections.abc import Callable
from time import monotonic
from typing import Final

from protos.errors import Unavailable

MOST_IN_A_ROW: Final = 32
"""Results in a row without computation that are a stall."""

LONGEST_S: Final = 0.5
"""Seconds from the first such result to the last, or for which running requests may have no plan."""

# A few results without work may surround one slow step.
_FEWEST = 4


class Stall(enum.Enum):
    """The kind of a stall; the value is its name in logs and metrics."""

    EMPTY = "empty"
    """Plans without work, or whose work is skipped."""
    UNPLANNED = "unplanned"
    """Nothing: its scheduler makes no plan."""


class Stalled(Unavailable):
    """A replica computed nothing again after it had started over."""


class ProgressWatch:
    """Watches one replica.

    Only results count, so a step that takes long is no stall; its time limit is another matter. Results of
    plans that were sent before the first of a series do not count: on a pipeline, one failed chunk leaves
    several plans without work. The first stall in a row makes the replica start over, and the second one
    costs it its registration.
    """

    def __init__(
        self, on_change: Callable[[Stall | None], object], clock: Callable[[], float] = monotonic
    ) -> None:
        """Starts watching.

        Args:
            on_change: called with each stall, and with None after recovery.
            clock: monotonic seconds.
        """
        self._on_change = on_change
        self._clock = clock
        # Results of the present series that count, and those to come that do not; None before a series.
        self._count = 0
        self._excused: int | None = None
        self._since_s = 0.0
        self._stalled = False

    def computed(self) -> None:
        """Notes a result of a step that ran or failed, or that no request runs."""
        self._count, self._excused = 0, None
        if self._stalled:
            self._stalled = False
            self._on_change(None)

    def idled(self, stall: Stall, *, in_flight: int = 0) -> bool:
        """Notes that nothing was computed while requests ran.

        Args:
            stall: the kind of a stall that this is a sign of.
            in_flight: plans that are not answered.

        Returns:
            Whether the replica must start over.

        Raises:
            Stalled: it has started over already, and has computed nothing since.
        """
        if self._excused is None:
            self._excused = in_flight
        elif self._excused:
            self._excused -= 1
            return False
        now = self._clock()
        if not self._count:
            self._since_s = now
        self._count += 1
        soon = now - self._since_s < LONGEST_S
        if stall is Stall.UNPLANNED:
            # Wakes come from outside, so their number means nothing.
            if self._count < 2 or soon:
                return False
        elif self._count < MOST_IN_A_ROW and (self._count < _FEWEST or soon):
            return False
        count, self._count, self._excused = self._count, 0, None
        self._on_change(stall)
        if self._stalled:
            raise Stalled(
                f"nothing was computed in {count} turns ({stall.value}) while requests ran, and as many before;"
                " the worker is given up"
            )
        self._stalled = True
        return True
