"""The buffer between the step loops and the writer of a gRPC stream."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from protos.errors import TriptychError
from protos.service.backpressure import UnreadLimits
from scheduler_svc.requests.request import Event, TokenColumns
from scheduler_svc.requests.sampling import FinishReason

# Buffered tokens beyond which the reader of a stream accepts no more requests.
_MAX_BUFFERED: Final = 4096

# Tokens that a writer takes at a time. It holds them while it waits for a client that does not read, so a
# stream that is ended must not have taken all there is.
_MOST_TAKEN: Final = 16_384


class EventBuffer:
    """Collects the events of a client's requests, for the writer of its stream.

    Code that adds events in answer to client messages must wait for :meth:`has_room` first.
    """

    def __init__(
        self,
        limits: UnreadLimits,
        abort: Callable[[], None],
        count_loss: Callable[[TriptychError | None], None] = lambda _: None,
    ) -> None:
        """Starts empty.

        Args:
            limits: bounds of the client's unread output.
            abort: aborts the client's requests, because it reads too slowly.
            count_loss: counts a request that fails, given its error, or a sequence that is aborted.
        """
        self._count_loss = count_loss
        self._abort = abort
        self._unread = limits.reader(self._end)
        self._error: TriptychError | None = None
        self._events: list[Event | TokenColumns] = []
        self._num_buffered = 0
        self._num_taken = 0
        self._filled = asyncio.Event()
        self._taken = asyncio.Event()

    def push(self, event: Event) -> None:
        """Adds an event."""
        if event.error is not None or event.finish_reason is FinishReason.ABORT:
            self._count_loss(event.error)
        self._add(event, _weight(event))

    def refuse(self, request_id: str, error: TriptychError) -> None:
        """Adds the event of a request that was not accepted."""
        self._add(Event(request_id, error=error), 1)

    def push_tokens(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        """Adds a plain token for each request, as a single entry."""
        self._add((request_ids, token_ids), len(token_ids))

    def _add(self, event: Event | TokenColumns, weight: int) -> None:
        if self._error is not None:
            return
        if not self._events:
            self._filled.set()
        self._events.append(event)
        self._num_buffered += weight
        self._unread.add(weight)

    def _end(self, error: TriptychError) -> None:
        """Drops all events, now and from now on; :meth:`take` and :meth:`has_room` raise `error`."""
        self._error = error
        self._events.clear()
        self._num_buffered = 0
        self._filled.set()
        self._taken.set()
        self._abort()

    def wake(self) -> None:
        """Makes :meth:`take` return, even without events."""
        self._filled.set()

    async def take(self) -> list[Event | TokenColumns]:
        """Waits for events or :meth:`wake`, and takes all events, or as many as a writer may hold.

        Those taken before count as read.

        Raises:
            Overloaded: if the client reads too slowly. Its requests have been aborted.
        """
        self._unread.remove(self._num_taken)
        self._num_taken = 0
        await self._filled.wait()
        if self._error is not None:
            raise self._error
        if self._num_buffered > _MOST_TAKEN:
            return self._take_some()
        self._filled.clear()
        events, self._events = self._events, []
        self._num_taken, self._num_buffered = self._num_buffered, 0
        self._taken.set()
        return events

    def _take_some(self) -> list[Event | TokenColumns]:
        count = 0
        while self._num_taken <= _MOST_TAKEN and count < len(self._events):
            self._num_taken += _weight(self._events[count])
            count += 1
        self._num_buffered -= self._num_taken
        events, self._events = self._events[:count], self._events[count:]
        if not self._events:
            self._filled.clear()
        self._taken.set()
        return events

    async def has_room(self) -> None:
        """Waits until the client has read most of its events.

        Raises:
            Overloaded: as :meth:`take` does.
        """
        while self._num_buffered > _MAX_BUFFERED:
            self._taken.clear()
            await self._taken.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Ends the count of unread output at the end of the stream."""
        self._unread.close()


def _weight(event: Event | TokenColumns) -> int:
    """Returns the tokens of an event, at least 1, and its log-probabilities."""
    if isinstance(event, tuple):
        return len(event[1])
    entries = (*event.logprobs, *event.prompt_logprobs) if event.logprobs or event.prompt_logprobs else ()
    return max(1, len(event.token_ids)) + sum(1 + len(entry.top_token_ids) for entry in entries)
