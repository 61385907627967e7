"""Counts lost workers, and the requests that are suspects or failed because of them, for logs and metrics."""

from collections import Counter

from protos.service.logs import get_logger
from scheduler_svc.replica.suspects import Detached, Loss
from scheduler_svc.workers.progress import Stall

# Ids of requests that a log line names at most.
_MOST_NAMED = 16


class Losses:
    """Losses since the scheduler's start."""

    def __init__(self) -> None:
        """Starts without losses."""
        self.workers: Counter[Loss] = Counter()
        """Attached workers that were lost or left, by reason."""
        self.stalls: Counter[Stall] = Counter()
        """Stalls of replicas by kind."""
        self.num_suspects = 0
        """Times that a request became a suspect because of a lost worker."""
        self.num_failed = 0
        """Requests that failed because too many workers were lost with them."""
        self._log = get_logger()

    def note(self, replica_id: str, loss: Loss, detached: Detached) -> None:
        """Counts a loss and logs what it means for requests."""
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
