"""Requests under way on the Connect stream, and the mailbox in which their events arrive."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from protos.errors import Internal, TriptychError
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference

# Request ids are limited to 128 bytes; attempts after a lost scheduler get a suffix.
MAX_REQUEST_ID: Final = 112


class Live:
    """One request that has not finished.

    Attributes:
        request: as it was last sent.
        n: its sequences.
        received: tokens of each sequence so far, in order.
        ended: sequences of which no more is wanted, because they have finished or their reader has seen enough.
        prompt_logprobs: of the prompt's tokens but the first, as far as they have come. Tokens of further sequences may come before them.
        untold: events that wait for the rest of them, in order, each with its sequence's number in the submission.
        index: the number of its first sequence in its submission.
        accepted: whether it has been running, so that trouble means waiting instead of failing.
        deadline: runs while the request waits for a lost scheduler.
        patience: what was left of the deadline when it stopped, seconds; ``None``: all of it.
        retry: runs until it is sent again.
    """

    __slots__ = (
        "_attempt",
        "_first_id",
        "_num_to_tell",
        "accepted",
        "deadline",
        "ended",
        "index",
        "n",
        "patience",
        "prompt_logprobs",
        "received",
        "request",
        "retry",
        "submission",
        "untold",
    )

    def __init__(self, request: inference.GenerateRequest, submission: "Submission", index: int) -> None:
        self.request = request
        self.submission = submission
        self.index = index
        self.n = request.n or 1
        self.received: list[list[int]] = [[] for _ in range(self.n)]
        self.ended: set[int] = set()
        self.prompt_logprobs: list[pb.TokenLogprobs] = []
        self.untold: list[tuple[int, inference.GenerateEvent]] = []
        self.accepted = False
        self.deadline: asyncio.TimerHandle | None = None
        self.patience: float | None = None
        self.retry: asyncio.TimerHandle | None = None
        self._first_id = request.request_id
        self._attempt = 0
        asked = request.sampling.HasField("prompt_logprobs")
        self._num_to_tell = len(request.prompt_token_ids) - 1 if asked else 0

    @property
    def wire_id(self) -> str:
        """Its id on the wire; a new one per attempt."""
        return self.request.request_id

    @property
    def over(self) -> bool:
        """Whether all of its sequences have ended."""
        return len(self.ended) == self.n

    @property
    def told(self) -> bool:
        """Whether all log-probabilities of the prompt are there, if they were asked for."""
        return len(self.prompt_logprobs) >= self._num_to_tell

    def on_event(self, event: inference.GenerateEvent) -> None:
        """Notes what arrived."""
        self.received[event.sequence].extend(event.token_ids)
        if event.finish_reason:
            self.ended.add(event.sequence)
        self.prompt_logprobs.extend(event.prompt_logprobs)
        self.accepted = True
        self.patience = None
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def on_written(self) -> None:
        """Stops the deadline: a scheduler has the request, and may let it wait its turn.

        The time until then stays spent, or a scheduler that turns it away again and again would never be given up.
        """
        if self.deadline is not None:
            self.patience = max(0.0, self.deadline.when() - asyncio.get_running_loop().time())
            self.deadline.cancel()
            self.deadline = None

    def renew(self) -> None:
        """Makes ``request`` one whose sequences continue behind what was received of each."""
        self._attempt += 1
        renewed = inference.GenerateRequest()
        renewed.CopyFrom(self.request)
        renewed.request_id = f"{self._first_id}.r{self._attempt}"
        renewed.ClearField("resumed")
        for sequence, token_ids in enumerate(self.received):
            if sequence in self.ended:
                renewed.resumed.add(sequence=sequence, finished=True)
            elif token_ids:
                renewed.resumed.add(sequence=sequence, token_ids=token_ids)
        if self.prompt_logprobs and len(self.prompt_logprobs) >= len(renewed.prompt_token_ids) - 1:
            renewed.sampling.ClearField("prompt_logprobs")
        else:
            # The next scheduler begins with the first of them.
            self.prompt_logprobs.clear()
        self.request = renewed

    def stop_timers(self) -> None:
        """Cancels what is scheduled for it."""
        for timer in (self.deadline, self.retry):
            if timer is not None:
                timer.cancel()
        self.deadline = self.retry = None


class Submission:
    """The events of requests that were submitted together, for one reader. Their sequences are numbered through, in the requests' order."""

    def __init__(
        self, requests: Sequence[inference.GenerateRequest], abort: Callable[[Live, int | None], None]
    ) -> None:
        """Waits for the events of ``requests``.

        Args:
            requests: what belongs to it.
            abort: drops one of them, or one of its sequences, here and at the scheduler; harmless for what has finished.
        """
        self.live: list[Live] = []
        self._sequences: list[tuple[Live, int]] = []
        for request in requests:
            live = Live(request, self, len(self._sequences))
            self.live.append(live)
            self._sequences += [(live, sequence) for sequence in range(live.n)]
        self._abort = abort
        self._unfinished = set(range(len(self._sequences)))
        self._events: list[tuple[int, inference.GenerateEvent]] = []
        self._error: TriptychError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> list[tuple[int, inference.GenerateEvent]]:
        """Waits for events and returns all that are there, each with its sequence's number; empty once all have finished.

        Raises:
            TriptychError: if a request failed. The others of the submission have then been aborted.
        """
        while not self._events and self._error is None and self._unfinished:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._events:
            events, self._events = self._events, []
            return events
        if self._error is not None:
            raise self._error
        if any(live.untold for live in self.live):
            raise Internal(
                "the scheduler ended a request without telling all of its prompt's log-probabilities"
            )
        return []

    def put(self, index: int, event: inference.GenerateEvent) -> None:
        """Adds an event of sequence ``index``.

        What was asked about a prompt is known before its answers begin: until then their events wait.
        """
        if event.finish_reason:
            self._unfinished.discard(index)
        live, _ = self._sequences[index]
        if live.told:
            if live.untold:
                self._events += live.untold
                live.untold.clear()
            self._events.append((index, event))
        else:
            live.untold.append((index, event))
        self._wake()

    def fail(self, error: TriptychError) -> None:
        """Ends all of it with ``error``; events that arrived before are still delivered, unless they wait for their prompt."""
        self.abort()
        if self._error is None:
            self._error = error
        self._wake()

    def abort(self) -> None:
        """Drops all requests that have not finished; no further events of them will come."""
        for live in self.live:
            self._abort(live, None)

    def finish(self, index: int) -> None:
        """The reader needs no more of sequence ``index`` (a stop string was found): aborts it and counts it as finished."""
        self._unfinished.discard(index)
        self._abort(*self._sequences[index])

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def finished_already(
    request: inference.GenerateRequest, sequence: int, received: list[int], eos_token_ids: frozenset[int]
) -> inference.GenerateEvent | None:
    """The last event of a sequence whose tokens are complete although its end was never heard; ``None`` if it goes on.

    A connection can break between a sequence's last token and the word that it was the last.
    """
    sampling = request.sampling
    event = inference.GenerateEvent(request_id=request.request_id, sequence=sequence)
    if received and _ends(sampling, received[-1], len(received), eos_token_ids):
        event.finish_reason = pb.FINISH_REASON_STOP
        event.stop_token_id = received[-1]
        return event
    if sampling.HasField("max_tokens") and len(received) >= sampling.max_tokens:
        event.finish_reason = pb.FINISH_REASON_LENGTH
        return event
    return None


def _ends(sampling: pb.SamplingParams, last: int, count: int, eos_token_ids: frozenset[int]) -> bool:
    """Whether the ``count``-th token of a sequence is its end."""
    if last in eos_token_ids and sampling.HasField("structured_output"):
        # A grammar that is through ends a sequence, whatever ignore_eos and min_tokens say.
        return True
    if count < sampling.min_tokens:
        return False
    return last in sampling.stop_token_ids or (last in eos_token_ids and not sampling.ignore_eos)
