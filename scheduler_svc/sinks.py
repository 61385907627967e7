"""Where events go on their way to clients: buffers between the step loop and a gRPC stream's writer."""

import asyncio

from scheduler_svc.request import Event


class EventBuffer:
    """Collects events; the writer takes all that have gathered at once, so one step's events leave in one message.

    Unbounded by itself: what can gather is bounded by the max_tokens of the stream's requests.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._filled = asyncio.Event()

    def push(self, event: Event) -> None:
        """Adds an event."""
        self._events.append(event)
        self._filled.set()

    def wake(self) -> None:
        """Makes :meth:`take` return, even with nothing."""
        self._filled.set()

    async def take(self) -> list[Event]:
        """Waits for events (or :meth:`wake`) and takes all of them."""
        await self._filled.wait()
        self._filled.clear()
        events, self._events = self._events, []
        return events
