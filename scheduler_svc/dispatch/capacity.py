"""Limits on what may wait: fixed ones from the settings, others from the replicas that are ready."""

from collections.abc import Iterable

from protos.errors import InvalidArgument, Overloaded
from protos.limits import MAX_SEQUENCES
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.requests.admission import ModelLimits, Submission
from scheduler_svc.requests.sequence_group import SEQUENCES_PER_SLOT


class Capacity:
    """Decides whether the queue takes a submission.

    The limits that depend on replicas keep their last values while no replica is ready.
    """

    def __init__(self, max_waiting: int, max_waiting_tokens: int) -> None:
        """Starts without replicas.

        Args:
            max_waiting: requests that may wait at once.
            max_waiting_tokens: prompt tokens that may wait at once.
        """
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._num_slots = 0
        self.max_request_tokens = 0
        """Longest sequence that fits into the KV memory of some replica."""

    def measure(self, replicas: Iterable[ReplicaScheduler], model: ModelLimits | None) -> None:
        """Recomputes the limits that depend on the ready replicas; there must be at least one."""
        schedulers = list(replicas)
        self._num_slots = sum(scheduler.geometry.max_num_seqs for scheduler in schedulers)
        self.max_request_tokens = max(
            scheduler.kv.max_tokens(model.max_model_len) if model else 0 for scheduler in schedulers
        )

    def check(self, submission: Submission, *, num_waiting: int, waiting_tokens: int) -> None:
        """Refuses a submission that does not fit into the queue, now or ever.

        Raises:
            InvalidArgument: the request has too many sequences for this deployment.
            Overloaded: the queue is full.
        """
        sequences, num_prompt = submission.sequences, len(submission.prompt_token_ids)
        count = len(sequences)
        limit = min(MAX_SEQUENCES, self._max_waiting)
        if not submission.resumed:
            # A resumed request may predate a lost replica; skip the slot limit.
            limit = min(limit, SEQUENCES_PER_SLOT * self._num_slots)
        if count > limit:
            raise InvalidArgument(
                f"n must be at most {limit} here, not {count}; send several requests", param="n"
            )
        if count > 1 and count * num_prompt > self._max_waiting_tokens:
            raise InvalidArgument(
                f"{count} sequences of {num_prompt} prompt tokens exceed the {self._max_waiting_tokens} tokens that may wait; "
                "send several requests with a smaller n",
                param="n",
            )
        num_tokens = count * num_prompt + sum(map(len, sequences.values()))
        if num_waiting + count > self._max_waiting or (
            waiting_tokens and waiting_tokens + num_tokens > self._max_waiting_tokens
        ):
            raise Overloaded(
                f"{num_waiting} requests with {waiting_tokens} tokens are waiting; retry later",
                retry_after_ms=1000,
            )
