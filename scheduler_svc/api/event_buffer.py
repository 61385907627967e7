"""Where events go on their way to clients: buffers between the step loop and a gRPC stream's writer."""

import asyncio

from scheduler_svc.requests.request import Event

# Events beyond which a stream's reader stops taking in more requests.
_MAX_GATHERED = 4096


class EventBuffer:
    """Collects events; the writer takes all that have gathered at once, so one step's events leave in one message.

    What running requests can add is bounded by their max_tokens; who adds more on a client's word waits for :meth:`has_room` first.
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
        """Adds one plain token: no object is made for it before it leaves."""
        if not self._events:
            self._filled.set()
        self._events.append((request_id, token_id))

    def wake(self) -> None:
        """Makes :meth:`take` return, even with nothing."""
        self._filled.set()

    async def take(self) -> list[Event | tuple[str, int]]:
        """Waits for events (or :meth:`wake`) and takes all of them; a pair is a request's id and one token."""
        await self._filled.wait()
        self._filled.clear()
        events, self._events = self._events, []
        self._taken.set()
        return events

    async def has_room(self) -> None:
        """Waits while more events have gathered than a client that reads would leave."""
        while len(self._events) > _MAX_GATHERED:
            self._taken.clear()
            await self._taken.wait()
