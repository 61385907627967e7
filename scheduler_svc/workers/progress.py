"""Detects stalled replicas: their plans compute nothing while requests run."""

import enum
from collections.abc import Callable
from time import monotonic
from typing import Final

from protos.errors import Unavailable

MOST_IN_A_ROW: Final = 32
"""Consecutive results without computation that are a stall."""

LONGEST_S: Final = 0.5
"""Longest time between the first and the last such result, or without a plan for running requests."""

# A few results without work may surround a slow step.
_FEWEST = 4


class Stall(enum.Enum):
    """The kind of a stall; the value is its name in logs and metrics."""

    EMPTY = "empty"
    """Plans without work or with skipped work."""
    UNPLANNED = "unplanned"
    """No plan from the scheduler."""


class Stalled(Unavailable):
    """A replica computed nothing, again after a new start."""


class ProgressWatch:
    """Watches a replica.

    Only results count: a slow step is no stall and is limited elsewhere. Results of plans in flight at the
    beginning of a series do not count, because on a pipeline a failed chunk leaves several plans without
    work. The first stall makes the replica start over; the second in a row costs it its registration.
    """

    def __init__(
        self, on_change: Callable[[Stall | None], object], clock: Callable[[], float] = monotonic
    ) -> None:
        """Starts watching; `on_change` is called with each stall, and with None after recovery."""
        self._on_change = on_change
        self._clock = clock
        # Results counted in this series, and results still to ignore; None before a series.
        self._count = 0
        self._excused: int | None = None
        self._since_s = 0.0
        self._stalled = False

    def computed(self) -> None:
        """Notes a step, failed or not, or that no request runs."""
        self._count, self._excused = 0, None
        if self._stalled:
            self._stalled = False
            self._on_change(None)

    def idled(self, stall: Stall, *, in_flight: int = 0) -> bool:
        """Notes that nothing was computed for running requests, with `in_flight` plans unanswered.

        Returns:
            Whether the replica must start over, because of a stall of this kind.

        Raises:
            Stalled: it computed nothing since its last new start.
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
