"""Requests under way on the Connect stream, and the subscriptions that receive their events."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol, Self

from gateway.http.errors import internal
from protos.errors import Internal, TriptychError
from protos.limits import MAX_REQUEST_ID_BYTES
from protos.service.logs import get_logger
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference

# Leaves room for the suffix that each attempt after a lost scheduler adds.
MAX_REQUEST_ID: Final = MAX_REQUEST_ID_BYTES - 16

# The largest age that the schema allows: a week.
_LONGEST_AGE_MS: Final = 7 * 24 * 3600 * 1000


class SequenceEvent(NamedTuple):
    """An update for a sequence. Copies its values so that the step's message can be freed."""

    token_ids: Sequence[int] = ()
    """New tokens, in order."""
    finish_reason: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED
    """Set in the sequence's last event."""
    stop_token_id: int | None = None
    """The end token or stop token that ended the sequence, if any."""
    logprobs: Sequence[pb.TokenLogprobs] = ()
    """An entry per token if the request asks for them."""
    num_cached_tokens: int | None = None
    """Prompt tokens that came from the prefix cache; set in the first event of a request."""
    replica_id: str = ""
    """The replica that runs the request; set in its first event."""

    @classmethod
    def from_proto(cls, event: inference.GenerateEvent) -> Self:
        """Returns the parts of ``event`` for readers."""
        return cls(
            tuple(event.token_ids),
            event.finish_reason,
            event.stop_token_id if event.HasField("stop_token_id") else None,
            event.logprobs,
            event.prompt.num_cached_tokens if event.HasField("prompt") else None,
            event.prompt.replica_id,
        )


class PendingRequest:
    """An unfinished request."""

    __slots__ = (
        "_attempt",
        "_failed_since_s",
        "_first_id",
        "_is_taken",
        "_num_at_failure",
        "_num_prompt_logprobs",
        "_num_resumed",
        "_silent_since_s",
        "_submitted_s",
        "_worker_losses",
        "accepted",
        "deadline",
        "ended",
        "first_index",
        "handles",
        "held_events",
        "n",
        "park_until",
        "prompt_logprobs",
        "received",
        "request",
        "retry",
        "subscription",
    )

    request: inference.GenerateRequest
    """The request as it was last sent."""
    subscription: "Subscription"
    """Receives the events."""
    first_index: int
    """The number of its first sequence in the subscription."""
    n: int
    """Number of its sequences."""
    received: list[list[int]]
    """Tokens of each sequence so far."""
    ended: set[int]
    """Sequences without further events: finished, or no longer wanted by their reader."""
    prompt_logprobs: list[pb.TokenLogprobs]
    """Log-probabilities of the prompt's tokens but the first, as far as received."""
    handles: dict[int, int]
    """The handle of each sequence on the open stream."""
    held_events: list[tuple[int, SequenceEvent | int]]
    """Events that arrived before the prompt's log-probabilities were complete, each with its sequence's
    number in the subscription."""
    accepted: bool
    """Whether a scheduler accepted it: after further errors it then waits instead of failing."""
    deadline: asyncio.TimerHandle | None
    """Runs until a scheduler takes the request, once there was none."""
    park_until: float
    """Until when it may wait in the startup queue, by the event loop's clock."""
    retry: asyncio.TimerHandle | None
    """Runs until a refused request is sent again."""

    def __init__(
        self, request: inference.GenerateRequest, subscription: "Subscription", first_index: int
    ) -> None:
        self.request = request
        self.subscription = subscription
        self.first_index = first_index
        self.n = request.n or 1
        self.received = [[] for _ in range(self.n)]
        self.ended = set()
        self.prompt_logprobs = []
        self.handles = {}
        self.held_events = []
        self.accepted = False
        self.deadline = None
        self.park_until = 0.0
        self.retry = None
        self._submitted_s = time.monotonic()
        # Whether a scheduler has taken the request since it was last sent.
        self._is_taken = False
        # Tokens received when a scheduler failed the request, and since when it has failed with as many.
        self._num_at_failure = -1
        self._failed_since_s = 0.0
        # Tokens received when the request was last sent again, and when it was first sent again with as many.
        self._num_resumed = 0
        self._silent_since_s = self._submitted_s
        # Workers that each sequence may have killed, as the scheduler says.
        self._worker_losses = [0] * self.n
        self._first_id = request.request_id
        self._attempt = 0
        asked = request.sampling.HasField("prompt_logprobs")
        self._num_prompt_logprobs = len(request.prompt_token_ids) - 1 if asked else 0

    @property
    def wire_id(self) -> str:
        """The request's id on the wire, new for each attempt."""
        return self.request.request_id

    @property
    def finished(self) -> bool:
        """Whether all sequences ended."""
        return len(self.ended) == self.n

    @property
    def prompt_complete(self) -> bool:
        """Whether all log-probabilities of the prompt are known, if asked for."""
        return len(self.prompt_logprobs) >= self._num_prompt_logprobs

    def on_event(self, event: inference.GenerateEvent) -> None:
        """Records ``event`` and stops the deadline."""
        self.received[event.sequence].extend(event.token_ids)
        if event.finish_reason:
            self.ended.add(event.sequence)
        self.prompt_logprobs.extend(event.prompt_logprobs)
        if event.HasField("worker_losses"):
            self._worker_losses[event.sequence] = event.worker_losses
        if event.HasField("prompt") and event.prompt.HasField("seed"):
            # The rest of the answer must be sampled with the same seed, on another scheduler too.
            self.request.sampling.seed = event.prompt.seed
        if event.prompt.lora_digest:
            # And computed with the same weights, whatever has the adapter's name by then.
            self.request.lora_digest = event.prompt.lora_digest
        self.accepted = self._is_taken = True
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def failed_for_s(self) -> float:
        """Returns for how long schedulers accepted the request and failed it without a token, seconds.

        Call it at each failure; 0 if the request was not taken since it was last sent.
        """
        if not self._is_taken:
            return 0.0
        now_s = time.monotonic()
        if (num_received := sum(map(len, self.received))) != self._num_at_failure:
            self._num_at_failure, self._failed_since_s = num_received, now_s
        return now_s - self._failed_since_s

    def prepare_resume(self) -> None:
        """Replaces ``request`` with a request that continues each sequence after the tokens received.

        After a scheduler's acceptance, the next scheduler learns the request's age and may not refuse it for
        a full queue.
        """
        self._attempt += 1
        self._is_taken = False
        resumed = inference.GenerateRequest()
        resumed.CopyFrom(self.request)
        resumed.request_id = f"{self._first_id}.r{self._attempt}"
        resumed.ClearField("resumed")
        now_s = time.monotonic()
        if self.accepted:
            resumed.age_ms = _age_ms(now_s - self._submitted_s)
        if (num_received := sum(map(len, self.received))) != self._num_resumed:
            self._num_resumed, self._silent_since_s = num_received, now_s
        if num_received:
            resumed.silent_ms = _age_ms(now_s - self._silent_since_s)
        for sequence, token_ids in enumerate(self.received):
            losses = self._worker_losses[sequence]
            if sequence in self.ended:
                resumed.resumed.add(sequence=sequence, finished=True)
            elif token_ids or losses:
                resumed.resumed.add(sequence=sequence, token_ids=token_ids, worker_losses=losses)
        if self.prompt_logprobs and len(self.prompt_logprobs) >= len(resumed.prompt_token_ids) - 1:
            resumed.sampling.ClearField("prompt_logprobs")
        else:
            # The next scheduler sends all of them again.
            self.prompt_logprobs.clear()
        self.request = resumed

    def stop_retry(self) -> None:
        """Cancels the retry."""
        if self.retry is not None:
            self.retry.cancel()
            self.retry = None

    def stop_timers(self) -> None:
        """Cancels the deadline and the retry."""
        self.stop_retry()
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


def _age_ms(seconds: float) -> int:
    return min(int(1000 * seconds), _LONGEST_AGE_MS)


class Receiver(Protocol):
    """Takes the events of a subscription as they arrive."""

    def push(self, events: Sequence[tuple[int, SequenceEvent | int]]) -> None:
        """Takes events in order, each with its sequence's number; a plain token comes as its id."""

    def end(self, error: TriptychError) -> None:
        """Takes the error that ends the requests, after all earlier events."""


class Subscription:
    """Requests submitted together, and the receiver of their events.

    Sequences are numbered across the requests, in their order. Events are pushed: a receiver runs within the
    delivery of a step, so it must not block.
    """

    requests: list[PendingRequest]
    """The requests, in the order given."""

    def __init__(
        self,
        requests: Sequence[inference.GenerateRequest],
        abort: Callable[[PendingRequest, int | None], None],
    ) -> None:
        """Creates a subscription without a receiver.

        Args:
            requests: the requests to send.
            abort: drops a request, or a single sequence of it, here and at the scheduler; no effect after
                its end.
        """
        self.requests = []
        self._sequences: list[tuple[PendingRequest, int]] = []
        for request in requests:
            pending = PendingRequest(request, self, len(self._sequences))
            self.requests.append(pending)
            self._sequences += [(pending, sequence) for sequence in range(pending.n)]
        self._abort = abort
        self._unfinished = set(range(len(self._sequences)))
        self._awaits_prompts = not all(pending.prompt_complete for pending in self.requests)
        self._events: list[tuple[int, SequenceEvent | int]] = []
        self._receiver: Receiver | None = None
        self._error: TriptychError | None = None

    def attach(self, receiver: Receiver) -> None:
        """Pushes all events, past and future, to ``receiver``."""
        self._receiver = receiver
        self.flush()
        if self._error is not None:
            receiver.end(self._error)

    def push(self, index: int, event: SequenceEvent | int, *, hold: bool = False) -> None:
        """Pushes an event of sequence ``index``, or a plain token.

        Events wait for all log-probabilities of their prompt, with which an answer begins.

        Args:
            index: the sequence's number.
            event: the event, or a token's id.
            hold: keep the event for the next :meth:`flush`, which must follow soon.
        """
        if not isinstance(event, int) and event.finish_reason:
            self._unfinished.discard(index)
        if self._awaits_prompts:
            pending, _ = self._sequences[index]
            pending.held_events.append((index, event))
            if not pending.prompt_complete:
                if not self._unfinished:
                    self.fail(
                        Internal("the scheduler ended a request without all log-probabilities of its prompt")
                    )
                return
            self._events += pending.held_events
            pending.held_events.clear()
        else:
            self._events.append((index, event))
        if not hold:
            self.flush()

    def flush(self) -> None:
        """Pushes the events held."""
        if self._receiver is None or not self._events:
            return
        events, self._events = self._events, []
        try:
            self._receiver.push(events)
        except Exception as error:  # noqa: BLE001 - other requests of the step must go on, whatever the bug
            get_logger().exception("an event could not be received")
            self.fail(internal(error))

    def fail(self, error: TriptychError) -> None:
        """Ends the requests with ``error``, after the events that do not wait for their prompt."""
        self.abort()
        if self._error is not None:
            return
        self._error = error
        self.flush()
        if self._receiver is not None:
            self._receiver.end(error)

    def abort(self) -> None:
        """Drops all unfinished requests; they deliver no further events."""
        for pending in self.requests:
            self._abort(pending, None)

    def finish(self, index: int) -> None:
        """Aborts sequence ``index`` and counts it as finished: its receiver found a stop string."""
        self._unfinished.discard(index)
        self._abort(*self._sequences[index])
