"""The requests under way on the Connect stream, and the new ones that wait for a scheduler."""

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, Self, TypeVar

from gateway.http.errors import internal
from protos.errors import (
    Aborted,
    Internal,
    InvalidArgument,
    Overloaded,
    TriptychError,
    Unavailable,
    from_proto,
)
from protos.limits import MAX_REQUEST_ID_BYTES
from protos.service.grpc_options import MAX_MESSAGE_BYTES
from protos.service.logs import get_logger
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference

T = TypeVar("T")

# What clients are told to wait before they send a request again that found no place or waited in vain.
_RETRY_AFTER_MS = 5000


class StartupQueue:
    """The new requests that wait. Anything hashable may stand for a request."""

    timeout_s: float
    """How long a request may wait."""
    refusal: str
    """Says that a scheduler refuses this gateway, and why; empty if none does."""

    def __init__(self, max_requests: int = 1024, timeout_s: float = 60.0) -> None:
        """Starts without requests."""
        self.timeout_s = timeout_s
        self.refusal = ""
        self._max_requests = max_requests
        self._parked: set[object] = set()

    def __len__(self) -> int:
        return len(self._parked)

    def __contains__(self, request: object) -> bool:
        return request in self._parked

    def has_room(self, count: int) -> bool:
        """Returns whether `count` more requests may wait."""
        return self.timeout_s > 0 and len(self._parked) + count <= self._max_requests

    def enter(self, request: object) -> bool:
        """Gives ``request`` a place, once; returns whether it holds a place now."""
        if request not in self._parked:
            if not self.has_room(1):
                return False
            self._parked.add(request)
        return True

    def leave(self, request: object) -> None:
        """Frees the place of ``request``, if any."""
        self._parked.discard(request)

    def full(self, reason: str) -> Unavailable:
        """Returns the error of a request without a place; ``reason`` says why it would have to wait."""
        return Unavailable(
            f"{reason}; no further request can wait for it, send this one again later",
            retry_after_ms=_RETRY_AFTER_MS,
        )

    def expired(self) -> Unavailable:
        """Returns the error of a request that waited in vain."""
        return Unavailable(
            f"no worker became ready within {self.timeout_s:g} s{self.because()}; send the request again later",
            retry_after_ms=_RETRY_AFTER_MS,
        )

    def because(self) -> str:
        """Returns the clause of errors that tells the refusal, if there is one."""
        return f", because {self.refusal}" if self.refusal else ""

    async def wait_for(self, work: Coroutine[Any, Any, T], reason: str) -> T:
        """Returns the result of ``work``, which waits for a scheduler, and holds a place meanwhile."""
        place = object()
        if not self.enter(place):
            work.close()
            raise self.full(reason)
        try:
            async with asyncio.timeout(self.timeout_s):
                return await work
        except TimeoutError:
            raise self.expired() from None
        finally:
            self.leave(place)


_SPREAD: Final = 0.5


def jittered(pause_s: float) -> float:
    """Returns a pause between ``pause_s`` and half as much again."""
    return pause_s * random.uniform(1, 1 + _SPREAD)  # noqa: S311 - no secret


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


@dataclass(slots=True, eq=False)
class PendingRequest:
    """An unfinished request."""

    request: inference.GenerateRequest
    """The request as it was last sent."""
    subscription: "Subscription"
    """Receives the events."""
    first_index: int
    """The number of its first sequence in the subscription."""
    n: int = field(init=False)
    """Number of its sequences."""
    received: list[list[int]] = field(init=False)
    """Tokens of each sequence so far."""
    ended: set[int] = field(default_factory=set)
    """Sequences without further events: finished, or no longer wanted by their reader."""
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens but the first, as far as received."""
    handles: dict[int, int] = field(default_factory=dict)
    """The handle of each sequence on the open stream."""
    held_events: list[tuple[int, SequenceEvent | int]] = field(default_factory=list)
    """Events that arrived before the prompt's log-probabilities were complete, each with its sequence's
    number in the subscription."""
    accepted: bool = False
    """Whether a scheduler accepted it: after further errors it then waits instead of failing."""
    deadline: asyncio.TimerHandle | None = None
    """Runs until a scheduler takes the request, once there was none."""
    park_until: float = 0.0
    """Until when it may wait in the startup queue, by the event loop's clock."""
    retry: asyncio.TimerHandle | None = None
    """Runs until a refused request is sent again."""
    _submitted_s: float = field(init=False)
    _is_taken: bool = False
    """Whether a scheduler has taken the request since it was last sent."""
    _num_at_failure: int = -1
    """Tokens received when a scheduler failed the request."""
    _failed_since_s: float = 0.0
    """Since when it has failed with that many tokens."""
    _num_resumed: int = 0
    """Tokens received when the request was last sent again."""
    _silent_since_s: float = field(init=False)
    """When it was first sent again with that many tokens."""
    _worker_losses: list[int] = field(init=False)
    """Workers that each sequence may have killed, as the scheduler says."""
    _first_id: str = field(init=False)
    _attempt: int = 0
    _num_prompt_logprobs: int = 0

    def __post_init__(self) -> None:
        self.n = self.request.n or 1
        self.received = [[] for _ in range(self.n)]
        self._submitted_s = self._silent_since_s = time.monotonic()
        self._worker_losses = [0] * self.n
        self._first_id = self.request.request_id
        if self.request.sampling.HasField("prompt_logprobs"):
            self._num_prompt_logprobs = len(self.request.prompt_token_ids) - 1

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
        self.stop_deadline()

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

    def stop_deadline(self) -> None:
        """Cancels the deadline."""
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


def _age_ms(seconds: float) -> int:
    return min(int(1000 * seconds), _LONGEST_AGE_MS)


class Receiver(Protocol):
    """Takes the events of a subscription as they arrive."""

    def push(self, events: Sequence[tuple[int, SequenceEvent | int]]) -> None:
        """Takes events in order, each with its sequence's number; a plain token comes as its id."""

    def push_token(self, index: int, token_id: int) -> None:
        """Takes a plain token of a sequence."""

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
        """Creates a subscription; ``abort`` drops a request, or a single sequence of it."""
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
        """Pushes an event of sequence ``index``, or a plain token; with ``hold``, at the next :meth:`flush`.

        Events wait for all log-probabilities of their prompt, with which an answer begins.
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

    def push_token(self, index: int, token_id: int) -> None:
        """Pushes a plain token of sequence ``index``. The hot path: it waits in no list if it need not."""
        if self._receiver is None or self._awaits_prompts or self._events:
            self.push(index, token_id)
            return
        try:
            self._receiver.push_token(index, token_id)
        except Exception as error:  # noqa: BLE001 - other requests of the step must go on, whatever the bug
            self._fail_receiver(error)

    def flush(self) -> None:
        """Pushes the events held."""
        if self._receiver is None or not self._events:
            return
        events, self._events = self._events, []
        try:
            self._receiver.push(events)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail_receiver(error)

    def _fail_receiver(self, error: Exception) -> None:
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


class Outbox:
    """A queue of messages for the scheduler. While no stream is open, it drops them."""

    __slots__ = ("_filled", "_messages", "is_open")

    is_open: bool
    """Whether a stream to a scheduler is open."""

    def __init__(self) -> None:
        self.is_open = False
        self._messages: deque[inference.ConnectRequest] = deque()
        self._filled = asyncio.Event()

    def open(self) -> None:
        """Starts empty: messages for an earlier stream are void."""
        self._messages.clear()
        self.is_open = True

    def close(self) -> None:
        """Drops messages from now on."""
        self.is_open = False

    def push(self, message: inference.ConnectRequest) -> None:
        """Appends ``message``, which the writer of the open stream sends soon."""
        if self.is_open:
            self._messages.append(message)
            self._filled.set()

    async def pop(self) -> inference.ConnectRequest:
        """Waits for the oldest message and removes it."""
        while not self._messages:
            self._filled.clear()
            await self._filled.wait()
        return self._messages.popleft()


# Pause before a refused request (no replica yet) is sent again, unless the scheduler says how long.
_RESUBMIT_PAUSE_S: Final = 0.5

# How long tokens wait for one another when messages arrive faster than their tokens are written, seconds.
_HOLD_S: Final = 0.02

# A longer request fits no message of the stream, with what else the message holds.
_MAX_REQUEST_BYTES: Final = MAX_MESSAGE_BYTES - 1024


class InFlightRequests:
    """The unfinished requests of this process."""

    def __init__(self, outbox: Outbox, startup_queue: StartupQueue, resume_timeout_s: float) -> None:
        """Creates an empty table."""
        self._outbox = outbox
        self._startup_queue = startup_queue
        self._resume_timeout_s = resume_timeout_s
        self._pending: dict[str, PendingRequest] = {}
        # While tokens wait for one another: the subscriptions that have some, and the timer that ends it.
        self._holding: set[Subscription] = set()
        self._release: asyncio.TimerHandle | None = None
        # By handle on the open stream: the received tokens of a sequence, its subscription, its number.
        self._by_handle: dict[int, tuple[list[int], Subscription, int]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def submit(self, requests: Sequence[inference.GenerateRequest]) -> Subscription:
        """Sends ``requests``; the subscription receives their events.

        While no stream is open, the requests wait; the caller made sure of room.
        """
        subscription = Subscription(requests, self.abort)
        park_until = asyncio.get_running_loop().time() + self._startup_queue.timeout_s
        for pending in subscription.requests:
            pending.park_until = park_until
            if not self._outbox.is_open and self._startup_queue.enter(pending):
                self._mark_lost(pending)
            self._send(pending)
        return subscription

    def fail_all(self, error: TriptychError) -> None:
        """Ends every request with ``error``."""
        for pending in list(self._pending.values()):
            pending.subscription.fail(error)

    def _send(self, pending: PendingRequest) -> None:
        self._pending[pending.wire_id] = pending
        if pending.request.ByteSize() > _MAX_REQUEST_BYTES:
            # The transport would refuse the message, and break the stream of all requests.
            pending.subscription.fail(
                InvalidArgument(
                    "the request, with the tokens generated so far, exceeds what one message holds; "
                    "send a shorter prompt or a smaller n"
                )
            )
            return
        self._outbox.push(inference.ConnectRequest(generate=pending.request))

    def deliver(self, response: inference.ConnectResponse, *, more_waits: bool = False) -> None:
        """Hands a step's events to their requests.

        The hot path: runs once per step, a few operations per token. If more waits already, tokens are
        collected for a moment: each client then gets several in a part, at little more cost than one.
        """
        if more_waits and self._release is None:
            self._release = asyncio.get_running_loop().call_later(_HOLD_S, self._release_tokens)
        by_handle, holding = self._by_handle, self._release is not None
        for handle, token_id in zip(response.handles, response.token_ids, strict=True):
            found = by_handle.get(handle)
            if found is None:
                continue  # aborted here; the abort is still on its way
            received, subscription, index = found
            received.append(token_id)
            if holding:
                subscription.push(index, token_id, hold=True)
                self._holding.add(subscription)
            else:
                subscription.push_token(index, token_id)
        for part in response.events:
            pending = self._pending.get(part.request_id)
            if pending is not None:
                # A part would keep the whole message in memory while its reader has not come.
                event = inference.GenerateEvent()
                event.CopyFrom(part)
                self._deliver_event(pending, event)

    def _release_tokens(self) -> None:
        self._release = None
        holding, self._holding = self._holding, set()
        for subscription in holding:
            subscription.flush()

    def _deliver_event(self, pending: PendingRequest, event: inference.GenerateEvent) -> None:
        if event.HasField("error"):
            self._on_error(pending, from_proto(event.error))
            return
        if event.sequence in pending.ended:
            return  # this sequence alone was aborted here
        if not pending.accepted:
            # It no longer needs a place: from now on it is as safe as a running request.
            pending.stop_retry()
            self._startup_queue.leave(pending)
        pending.on_event(event)
        if event.accepted or (not event.token_ids and event.HasField("worker_losses")):
            return  # for the next scheduler, not for the client
        index = pending.first_index + event.sequence
        if event.handle:
            self._by_handle[event.handle] = (pending.received[event.sequence], pending.subscription, index)
            pending.handles[event.sequence] = event.handle
        if event.finish_reason:
            self._drop_handle(pending, event.sequence)
            if pending.finished:
                self._forget(pending)
            if event.finish_reason == pb.FINISH_REASON_ABORT:
                pending.subscription.fail(Aborted("the request was aborted at the scheduler"))
                return
        pending.subscription.push(index, SequenceEvent.from_proto(event))

    def _drop_handle(self, pending: PendingRequest, sequence: int) -> None:
        handle = pending.handles.pop(sequence, None)
        if handle is not None:
            del self._by_handle[handle]

    def _drop_handles(self, pending: PendingRequest) -> None:
        for sequence in list(pending.handles):
            self._drop_handle(pending, sequence)

    def _on_error(self, pending: PendingRequest, error: TriptychError) -> None:
        if self._may_wait(pending, error):
            # The scheduler is draining, is new and has no replica yet, or lost its last one; or no worker can
            # load the request's adapter or compile its grammar for now.
            self._mark_lost(pending)
            pause = error.retry_after_ms / 1000 or _RESUBMIT_PAUSE_S
            later = asyncio.get_running_loop().call_later
            pending.retry = later(jittered(pause), self._retry, pending)
        else:
            self._forget(pending)
            pending.subscription.fail(error)

    def _may_wait(self, pending: PendingRequest, error: TriptychError) -> bool:
        """Returns whether a refused or failed request is sent again later.

        A new request must find a place for that. An accepted request must not fail for the same reason
        indefinitely.
        """
        if pending.accepted:
            may_pass = isinstance(error, Unavailable | Overloaded)
            return may_pass and pending.failed_for_s() <= self._resume_timeout_s
        in_time = asyncio.get_running_loop().time() < pending.park_until
        return isinstance(error, Unavailable) and in_time and self._startup_queue.enter(pending)

    def _retry(self, pending: PendingRequest) -> None:
        pending.retry = None
        # Without a stream there is nothing to do: the next one resubmits every request.
        if self._outbox.is_open and pending.wire_id in self._pending:
            self._resubmit(pending)

    def resubmit_all(self) -> None:
        """Sends every request again, on a new stream."""
        for pending in list(self._pending.values()):
            self._resubmit(pending)

    def _resubmit(self, pending: PendingRequest) -> None:
        """Sends a request again, with the tokens received so far.

        Its id is new, because a scheduler unaware of the loss may still know the old id. If a sequence's
        tokens are already complete, the scheduler answers with its finish reason.
        """
        pending.stop_retry()
        self._drop_handles(pending)
        del self._pending[pending.wire_id]
        pending.prepare_resume()
        self._send(pending)

    def mark_all_lost(self) -> None:
        """Starts every request's deadline: the stream is broken, and its handles with it."""
        for pending in self._pending.values():
            self._drop_handles(pending)
            if not pending.accepted:
                self._startup_queue.enter(pending)
            self._mark_lost(pending)

    def _mark_lost(self, pending: PendingRequest) -> None:
        pending.stop_retry()
        if pending.deadline is not None:
            return
        loop = asyncio.get_running_loop()
        until = pending.park_until if pending in self._startup_queue else loop.time() + self._resume_timeout_s
        pending.deadline = loop.call_at(until, self._give_up, pending)

    def _give_up(self, pending: PendingRequest) -> None:
        pending.subscription.fail(
            self._startup_queue.expired()
            if pending in self._startup_queue
            else Unavailable(
                f"the request was interrupted and could not be resumed within {self._resume_timeout_s:g} s"
                f"{self._startup_queue.because()}"
            )
        )

    def _forget(self, pending: PendingRequest) -> None:
        if self._pending.pop(pending.wire_id, None) is not None:
            pending.stop_retry()
            pending.stop_deadline()
            self._drop_handles(pending)
            self._startup_queue.leave(pending)

    def abort(self, pending: PendingRequest, sequence: int | None = None) -> None:
        """Drops a request, or a single sequence of it, and aborts it at the scheduler."""
        if self._pending.get(pending.wire_id) is not pending:
            return
        abort = inference.AbortRequest(request_id=pending.wire_id)
        if sequence is not None:
            if sequence in pending.ended:
                return
            pending.ended.add(sequence)
            self._drop_handle(pending, sequence)
        if sequence is None or pending.finished:
            self._forget(pending)
        else:
            abort.sequence = sequence
        self._outbox.push(inference.ConnectRequest(abort=abort))
