"""The phases between a request to configure and a serving worker, with their progress and their times."""

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
    """Reports and times the phases of one configuration."""

    seconds: dict[Phase, float]
    """How long each finished phase took."""

    def __init__(self, report: PhaseProgress) -> None:
        """Starts the clock of the first phase."""
        self._report = report
        self._started = time.monotonic()
        self.seconds = {}

    def progress(self, phase: Phase) -> Progress:
        """Returns a function that reports the progress of `phase`."""
        return lambda done, total, what: self._report(phase, done, total, what)

    def finish(self, phase: Phase) -> None:
        """Records that `phase` took the time since the phase before it ended."""
        now = time.monotonic()
        self.seconds[phase] = now - self._started
        self._started = now
