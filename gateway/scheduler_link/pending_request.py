"""Requests under way on the Connect stream, and the groups that receive their events."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, Self

from protos.errors import Internal, TriptychError
from protos.limits import MAX_REQUEST_ID_BYTES
from protos.overload.unread import UnreadLimits
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference

# Leaves room for the suffix that each attempt after a lost scheduler adds.
MAX_REQUEST_ID: Final = MAX_REQUEST_ID_BYTES - 16

# The largest age that the schema allows: a week.
_LONGEST_AGE_MS: Final = 7 * 24 * 3600 * 1000

# Plain tokens that are counted as unread at a time; counting each would cost as much as handing it out.
_COUNTED_TOGETHER: Final = 64


class SequenceEvent(NamedTuple):
    """News of one sequence. It may wait for its reader: it does not keep its step's message in memory."""

    token_ids: Sequence[int] = ()
    """New tokens, in order."""
    finish_reason: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED
    """Set in the sequence's last event."""
    stop_token_id: int | None = None
    """The end token or stop token that ended the sequence, if one did."""
    logprobs: Sequence[pb.TokenLogprobs] = ()
    """One entry per token if the request asks for them."""
    num_cached_tokens: int | None = None
    """Prompt tokens that came from the prefix cache; set in the first event of a request."""
    replica_id: str = ""
    """The replica that runs the request; set in its first event."""

    @classmethod
    def of(cls, event: inference.GenerateEvent) -> Self:
        """Returns what readers need of ``event``, which has a message of its own."""
        return cls(
            tuple(event.token_ids),
            event.finish_reason,
            event.stop_token_id if event.HasField("stop_token_id") else None,
            event.logprobs,
            event.prompt.num_cached_tokens if event.HasField("prompt") else None,
            event.prompt.replica_id,
        )


class PendingRequest:
    """One request that has not finished."""

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
        "group",
        "handles",
        "held_events",
        "n",
        "park_until",
        "prompt_logprobs",
        "received",
        "request",
        "retry",
    )

    request: inference.GenerateRequest
    """The request as it was last sent."""
    group: "RequestGroup"
    """Receives the events."""
    first_index: int
    """The number of its first sequence in the group."""
    n: int
    """How many sequences it has."""
    received: list[list[int]]
    """Tokens of each sequence so far."""
    ended: set[int]
    """Sequences that deliver no more events: they have finished, or their reader has seen enough."""
    prompt_logprobs: list[pb.TokenLogprobs]
    """Log-probabilities of the prompt's tokens but the first, as far as they have arrived."""
    handles: dict[int, int]
    """What stands for each sequence on the open stream, by sequence."""
    held_events: list[tuple[int, SequenceEvent]]
    """Events that arrived before the prompt's log-probabilities were complete, each with its sequence's
    number in the group."""
    accepted: bool
    """Whether a scheduler has taken it: after further errors it then waits instead of failing."""
    deadline: asyncio.TimerHandle | None
    """Runs until a scheduler takes the request, once there was none."""
    park_until: float
    """Until when it may be parked, by the event loop's clock."""
    retry: asyncio.TimerHandle | None
    """Runs until a refused request is sent again."""

    def __init__(self, request: inference.GenerateRequest, group: "RequestGroup", first_index: int) -> None:
        self.request = request
        self.group = group
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
        """The request's id on the wire; each attempt has a new one."""
        return self.request.request_id

    @property
    def finished(self) -> bool:
        """Whether all sequences have ended."""
        return len(self.ended) == self.n

    @property
    def prompt_complete(self) -> bool:
        """Whether all log-probabilities of the prompt have arrived, if any were asked for."""
        return len(self.prompt_logprobs) >= self._num_prompt_logprobs

    def on_event(self, event: inference.GenerateEvent) -> None:
        """Records what ``event`` brings and stops the deadline."""
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
        """Returns how long schedulers have taken the request and failed it without a token, seconds.

        Call it at each failure; 0 if the request was not taken since it was last sent.
        """
        if not self._is_taken:
            return 0.0
        now_s = time.monotonic()
        if (num_received := sum(map(len, self.received))) != self._num_at_failure:
            self._num_at_failure, self._failed_since_s = num_received, now_s
        return now_s - self._failed_since_s

    def prepare_resume(self) -> None:
        """Replaces ``request`` with one that continues each sequence behind the tokens received.

        If a scheduler has accepted the request, the next one learns its age and may not refuse it for a full
        queue.
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


def _weight(event: SequenceEvent) -> int:
    """Returns the tokens of an event, at least 1, and its log-probabilities."""
    return max(1, len(event.token_ids)) + sum(1 + len(entry.top_token_ids) for entry in event.logprobs)


class RequestGroup:
    """Requests that were submitted together, and their events for one reader.

    Sequences are numbered across the group, in the order of the requests.
    """

    requests: list[PendingRequest]
    """The group's requests, in the order in which they were given."""

    def __init__(
        self,
        requests: Sequence[inference.GenerateRequest],
        abort: Callable[[PendingRequest, int | None], None],
        limits: UnreadLimits,
    ) -> None:
        """Creates a group without events.

        Args:
            requests: the requests to send.
            abort: drops a request, or one of its sequences, here and at the scheduler; does nothing for
                finished ones.
            limits: bounds the events that may wait for the reader.
        """
        self.requests = []
        self._sequences: list[tuple[PendingRequest, int]] = []
        for request in requests:
            pending = PendingRequest(request, self, len(self._sequences))
            self.requests.append(pending)
            self._sequences += [(pending, sequence) for sequence in range(pending.n)]
        self._abort = abort
        self._unread = limits.reader(self._on_slow_reader)
        self._num_taken = 0
        # The number of waiting events with which the next plain tokens are counted.
        self._next_count = _COUNTED_TOGETHER
        self._unfinished = set(range(len(self._sequences)))
        self._may_hold = not all(pending.prompt_complete for pending in self.requests)
        # A plain token becomes an event when it is taken, so that a step's tokens are handed out quickly.
        self._events: list[tuple[int, SequenceEvent | int]] = []
        self._error: TriptychError | None = None
        self._listener: Callable[[int, int], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._interruption: Callable[[], Awaitable[None]] | None = None

    async def take(self) -> list[tuple[int, SequenceEvent]]:
        """Waits for events and returns all there are, each with its sequence's number.

        Returns an empty list once all sequences have finished.

        Raises:
            TriptychError: if a request failed; the others of the group have been aborted.
            Overloaded: if the reader came too late, and too many events waited. They are gone.
        """
        self._next_count = _COUNTED_TOGETHER
        self._unread.remove(self._num_taken)
        self._num_taken = 0
        while not self._events and self._error is None and self._unfinished:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
            if self._interruption is not None:
                call, self._interruption = self._interruption, None
                await call()
        if self._events:
            events, self._events = self._events, []
            self._num_taken = self._unread.num
            self._next_count = _COUNTED_TOGETHER
            return [
                (index, SequenceEvent((event,)) if isinstance(event, int) else event)
                for index, event in events
            ]
        if self._error is not None:
            raise self._error
        if any(pending.held_events for pending in self.requests):
            raise Internal("the scheduler ended a request before it sent all log-probabilities of its prompt")
        return []

    def listen(self, listener: Callable[[int, int], bool]) -> None:
        """Hands plain tokens to ``listener`` while the reader waits, without waking it.

        Args:
            listener: gets a sequence's number and its token; returns whether it has taken the token. The
                reader gets the others, and all further events.
        """
        self._listener = listener

    def interrupt(self, call: Callable[[], Awaitable[None]]) -> None:
        """Lets the reader await ``call`` before it waits on. Does nothing if it does not wait."""
        if self._waiter is not None:
            self._interruption = call
            self.wake()

    def put_token(self, index: int, token_id: int) -> None:
        """Adds one token of sequence ``index``: the most frequent event, with nothing but a token."""
        if self._may_hold:
            self.put(index, SequenceEvent((token_id,)))
            return
        if (
            self._listener is not None
            and self._waiter is not None
            and not self._events
            and self._listener(index, token_id)
        ):
            return
        self.hold_token(index, token_id)
        self.wake()

    def hold_token(self, index: int, token_id: int) -> None:
        """Adds a token as :meth:`put_token` does, but wakes no reader; :meth:`wake` must follow soon."""
        if self._may_hold:
            self.put(index, SequenceEvent((token_id,)))
            return
        self._events.append((index, token_id))
        if self._waiter is None and len(self._events) >= self._next_count:
            self._next_count += _COUNTED_TOGETHER
            self._unread.add(_COUNTED_TOGETHER)

    def put(self, index: int, event: SequenceEvent) -> None:
        """Adds an event of sequence ``index``.

        Events wait until all log-probabilities of their prompt have arrived, so that readers know them before
        an answer begins.
        """
        if event.finish_reason:
            self._unfinished.discard(index)
        pending, _ = self._sequences[index]
        if pending.prompt_complete:
            if pending.held_events:
                self._events += pending.held_events
                pending.held_events.clear()
            self._events.append((index, event))
            if self._waiter is None:
                self._next_count += 1
                self._unread.add(_weight(event))
        else:
            pending.held_events.append((index, event))
        self.wake()

    def fail(self, error: TriptychError) -> None:
        """Ends the group with ``error``.

        Earlier events are still delivered, unless they wait for their prompt.
        """
        self.abort()
        if self._error is None:
            self._error = error
        self.wake()

    def _on_slow_reader(self, error: TriptychError) -> None:
        self._events.clear()
        self.fail(error)

    def abort(self) -> None:
        """Drops all requests that have not finished; they deliver no further events."""
        self._unread.close()
        for pending in self.requests:
            self._abort(pending, None)

    def finish(self, index: int) -> None:
        """Aborts sequence ``index`` and counts it as finished: its reader found a stop string."""
        self._unfinished.discard(index)
        self._abort(*self._sequences[index])

    def wake(self) -> None:
        """Wakes the reader if it waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
