"""The phases from a request to configure to a serving worker, with their progress and their times."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeVar

Phase = Literal["load", "allocate", "compile", "warm_up"]

Progress = Callable[[int, int, str], None]
"""Called with the units done, the units in total (0: unknown) and a description of the next unit."""

PhaseProgress = Callable[[Phase, int, int, str], None]
"""The same, with the phase first."""

_Unit = TypeVar("_Unit")


def one_by_one(units: Sequence[_Unit], progress: Progress) -> Iterator[_Unit]:
    """Yields units of work and reports each before it begins, and the end after the last."""
    for done, unit in enumerate(units):
        progress(done, len(units), str(unit))
        yield unit
    progress(len(units), len(units), "done")


class Phases:
    """Reports and times the phases of a configuration."""

    seconds: dict[Phase, float]
    """Duration of each finished phase."""

    def __init__(self, report: PhaseProgress) -> None:
        """Starts the clock of the first phase."""
        self._report = report
        self._started = time.monotonic()
        self.seconds = {}

    def progress(self, phase: Phase) -> Progress:
        """Returns the function to report the progress of `phase`."""
        return lambda done, total, what: self._report(phase, done, total, what)

    def finish(self, phase: Phase) -> None:
        """Ends `phase`, which began with the end of the phase before."""
        now = time.monotonic()
        self.seconds[phase] = now - self._started
        self._started = now
