"""The buffer between the step loops and the writer of one gRPC stream."""

import asyncio
from collections.abc import Sequence

from scheduler_svc.requests.request import Event, TokenColumns

# Buffered events and tokens beyond which the reader of a stream accepts no more requests.
_MAX_BUFFERED = 4096


class EventBuffer:
    """Collects the events of a client's requests; the writer takes all of them at once.

    The `max_tokens` of running requests bound the number of events. Code that adds events in answer to client
    messages must wait for :meth:`has_room` first.
    """

    def __init__(self) -> None:
        self._events: list[Event | TokenColumns] = []
        self._filled = asyncio.Event()
        self._taken = asyncio.Event()

    def push(self, event: Event) -> None:
        """Adds an event."""
        if not self._events:
            self._filled.set()
        self._events.append(event)

    def push_tokens(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        """Adds one plain token for each request, as one entry."""
        if not self._events:
            self._filled.set()
        self._events.append((request_ids, token_ids))

    def wake(self) -> None:
        """Makes :meth:`take` return, even without events."""
        self._filled.set()

    async def take(self) -> list[Event | TokenColumns]:
        """Waits for events or :meth:`wake`, and takes all events."""
        await self._filled.wait()
        self._filled.clear()
        events, self._events = self._events, []
        self._taken.set()
        return events

    async def has_room(self) -> None:
        """Waits while the client is far behind in reading its events."""
        while sum(map(_num_tokens, self._events)) > _MAX_BUFFERED:
            self._taken.clear()
            await self._taken.wait()


def _num_tokens(event: Event | TokenColumns) -> int:
    return len(event[1]) if isinstance(event, tuple) else 1
