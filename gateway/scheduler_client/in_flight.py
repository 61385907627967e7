"""All requests under way, by their ids on the wire: delivery of events, aborts, retries and resumption."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final

from gateway.scheduler_client.pending_request import PendingRequest, SequenceEvent, Subscription
from gateway.scheduler_client.startup_queue import StartupQueue, jittered
from protos.errors import Aborted, InvalidArgument, Overloaded, TriptychError, Unavailable, from_proto
from protos.service.grpc_options import MAX_MESSAGE_BYTES
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference


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
        """Creates an empty table.

        Args:
            outbox: takes messages for the scheduler.
            startup_queue: the places of new requests that wait for a scheduler with a ready worker.
            resume_timeout_s: how long an interrupted request waits for a scheduler before it fails.
        """
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

    def _on_accepted(self, pending: PendingRequest) -> None:
        """Frees the request's place: from now on it is as safe as a running request."""
        pending.stop_retry()
        pending.accepted = True
        self._startup_queue.leave(pending)

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

        The hot path: runs once per step, a few operations per token.

        Args:
            response: the events.
            more_waits: whether the next message waits already. For a moment, tokens are then collected, so
                that each client gets several in a part, at little more cost than a single token.

        Raises:
            ValueError: if the columns differ in length.
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
            subscription.push(index, token_id, hold=holding)
            if holding:
                self._holding.add(subscription)
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
            self._on_accepted(pending)
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
            )
        )

    def _forget(self, pending: PendingRequest) -> None:
        if self._pending.pop(pending.wire_id, None) is not None:
            pending.stop_timers()
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
