"""The buffer between the step loops and the writer of one gRPC stream."""

import asyncio

from scheduler_svc.requests.request import Event

# Buffered events beyond which the reader of a stream accepts no more requests.
_MAX_BUFFERED = 4096


class EventBuffer:
    """Collects the events of a client's requests; the writer takes all of them at once.

    The `max_tokens` of running requests bound the number of events. Code that adds events in answer to client
    messages must wait for :meth:`has_room` first.
    """

    def __init__(self) -> None:
        self._events: list[Event | tuple[str, int]] = []
        self._filled = asyncio.Event()
        self._taken = asyncio.Event()

    def push(self, event: Event) -> None:
        """Adds an event."""
        if not self._events:
            self._filled.set()
        self._events.append(event)

    def push_token(self, request_id: str, token_id: int) -> None:
        """Adds one plain token, without an :class:`Event` object."""
        if not self._events:
            self._filled.set()
        self._events.append((request_id, token_id))

    def wake(self) -> None:
        """Makes :meth:`take` return, even without events."""
        self._filled.set()

    async def take(self) -> list[Event | tuple[str, int]]:
        """Waits for events or :meth:`wake`, and takes all events; a pair is a request id and one token."""
        await self._filled.wait()
        self._filled.clear()
        events, self._events = self._events, []
        self._taken.set()
        return events

    async def has_room(self) -> None:
        """Waits while the client is far behind in reading its events."""
        while len(self._events) > _MAX_BUFFERED:
            self._taken.clear()
            await self._taken.wait()
