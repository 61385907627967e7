"""Lost workers, and failed steps that may cost a worker its registration."""

from collections import Counter
from collections.abc import Callable
from time import monotonic

from protos.errors import Unavailable
from protos.service.logs import get_logger
from scheduler_svc.replica.quarantine import DetachReport, Loss
from scheduler_svc.workers.progress import Stall

# Most request ids in a log line.
_MOST_NAMED = 16

# Most workers with remembered failed steps; a restarted process is another worker.
_REMEMBERED = 1024


class Losses:
    """Losses since the scheduler's start."""

    def __init__(self, detach_after_failed_steps: int) -> None:
        """Starts without losses; a worker loses its registration after this many consecutive failed steps."""
        self._detach_after_failed_steps = detach_after_failed_steps
        # By worker, the latest registration last.
        self._failed_steps: dict[str, FailedSteps] = {}
        self.workers: Counter[Loss] = Counter()
        """Attached workers, lost or left, by reason."""
        self.stalls: Counter[Stall] = Counter()
        """Stalls of replicas by kind."""
        self.num_suspects = 0
        """Suspects so far: a request counts once for each lost worker."""
        self.num_failed = 0
        """Requests failed after the loss of too many workers."""
        self._log = get_logger()

    def failed_steps_of(self, worker_id: str) -> "FailedSteps":
        """Returns the failed steps of a worker, also of its earlier registrations."""
        found = self._failed_steps.pop(worker_id, None) or FailedSteps(self._detach_after_failed_steps)
        self._failed_steps[worker_id] = found
        if len(self._failed_steps) > _REMEMBERED:
            del self._failed_steps[next(iter(self._failed_steps))]
        return found

    def note(self, replica_id: str, loss: Loss, detached: DetachReport) -> None:
        """Counts a loss and logs its effect on requests."""
        self.workers[loss] += 1
        self.num_suspects += len(detached.suspects)
        self.num_failed += len(detached.failed)
        if detached.num_requeued:
            self._log.warning(
                "requests_requeued", replica=replica_id, reason=loss.value, count=detached.num_requeued
            )
        if detached.suspects:
            self._log.warning(
                "suspects",
                replica=replica_id,
                reason=loss.value,
                count=len(detached.suspects),
                requests=detached.suspects[:_MOST_NAMED],
            )
        if detached.failed:
            self._log.error("requests_killed_workers", replica=replica_id, requests=detached.failed)


_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


class FailedTooOften(Unavailable):
    """A worker failed too many steps in a row."""


class FailedSteps:
    """Counts the consecutive failed steps of a worker.

    A worker with a broken device fails its steps in no time and always looks empty. It is detached after too
    many failed steps, then after each one. Its pauses double until a step succeeds.
    """

    def __init__(self, limit: int, clock: Callable[[], float] | None = None) -> None:
        """Starts without failures; `limit` consecutive failed steps cost the worker its registration."""
        self._limit = limit
        self._clock = clock or monotonic
        self._last_s = 0.0
        self.in_a_row = 0
        """Failed steps since the last success."""

    @property
    def failing(self) -> bool:
        """Whether the last step failed recently; "recently" grows with the number of failures."""
        return self.in_a_row > 0 and self._clock() - self._last_s < _pause_s(self.in_a_row - 1)

    def succeeded(self) -> None:
        """Notes a success."""
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
        """Notes a stalled worker, which also pauses."""
        self.in_a_row = max(self.in_a_row + 1, self._limit)
        self._last_s = self._clock()

    def check(self) -> None:
        """Refuses a registration during a pause.

        Raises:
            Unavailable: the pause is not over.
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
