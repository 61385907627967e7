"""Failed steps of one worker, in a row and across its registrations."""

from collections.abc import Callable
from time import monotonic

from protos.errors import Unavailable

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


class FailedTooOften(Unavailable):
    """A worker failed too many steps in a row."""


class FailedSteps:
    """Counts the steps that a worker failed in a row.

    A worker with a broken device fails its steps in no time, so it always looks empty. After too many failed
    steps it is detached, and after one more each time it is back. Its pauses double until a step succeeds.
    """

    def __init__(self, limit: int, clock: Callable[[], float] | None = None) -> None:
        """Starts without failures.

        Args:
            limit: failed steps in a row that cost the worker its registration.
            clock: monotonic seconds.
        """
        self._limit = limit
        self._clock = clock or monotonic
        self._last_s = 0.0
        self.in_a_row = 0
        """Steps that failed since the last one that succeeded."""

    @property
    def failing(self) -> bool:
        """Whether the last step failed a short while ago; the more failed in a row, the longer that is."""
        return self.in_a_row > 0 and self._clock() - self._last_s < _pause_s(self.in_a_row - 1)

    def succeeded(self) -> None:
        """Notes a step that ran."""
        self.in_a_row = 0

    def failed(self, reason: str) -> None:
        """Notes a failed step.

        Raises:
            FailedTooOften: too many steps failed in a row.
        """
        self.in_a_row += 1
        self._last_s = self._clock()
        if self.in_a_row >= self._limit:
            raise FailedTooOften(f"{self.in_a_row} steps failed in a row, the last with: {reason}")

    def stalled(self) -> None:
        """Notes a worker that was given up because its steps computed nothing: it pauses, too."""
        self.in_a_row = max(self.in_a_row + 1, self._limit)
        self._last_s = self._clock()

    def check(self) -> None:
        """Checks that the worker may register now.

        Raises:
            Unavailable: the worker has failed too many steps and its pause is not over.
        """
        excess = self.in_a_row - self._limit
        if excess < 0:
            return
        pause_s = _pause_s(excess)
        left_s = self._last_s + pause_s - self._clock()
        if left_s > 0:
            raise Unavailable(
                "the worker's last steps failed or computed nothing;"
                f" it may register again after a pause of {pause_s:g} s",
                retry_after_ms=round(left_s * 1000),
            )


def _pause_s(times: int) -> float:
    return float(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(times, 10)))
