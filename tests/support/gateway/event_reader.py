"""Reads the events of a subscription one after another, as tests want them."""

import asyncio
from collections.abc import Sequence

from gateway.scheduler_client.pending_request import PendingRequest, SequenceEvent, Subscription
from protos.errors import TriptychError


class EventReader:
    """Keeps the events pushed by a subscription until a test takes them."""

    def __init__(self, subscription: Subscription) -> None:
        """Attaches itself to ``subscription``."""
        self.subscription = subscription
        self._events: list[tuple[int, SequenceEvent]] = []
        self._error: TriptychError | None = None
        self._unfinished = set(range(sum(pending.n for pending in subscription.requests)))
        self._news = asyncio.Event()
        subscription.attach(self)

    @property
    def requests(self) -> list[PendingRequest]:
        """The requests of the subscription."""
        return self.subscription.requests

    def push(self, events: Sequence[tuple[int, SequenceEvent | int]]) -> None:
        """Keeps events."""
        for index, event in events:
            known = SequenceEvent((event,)) if isinstance(event, int) else event
            if known.finish_reason:
                self._unfinished.discard(index)
            self._events.append((index, known))
        self._news.set()

    def end(self, error: TriptychError) -> None:
        """Keeps the error."""
        self._error = error
        self._news.set()

    async def take(self) -> list[tuple[int, SequenceEvent]]:
        """Waits for events and returns all of them; returns an empty list after the end of all sequences."""
        while not self._events and self._error is None and self._unfinished:
            self._news.clear()
            await self._news.wait()
        if self._events:
            events, self._events = self._events, []
            return events
        if self._error is not None:
            raise self._error
        return []

    def abort(self) -> None:
        """Drops all unfinished requests."""
        self.subscription.abort()

    def fail(self, error: TriptychError) -> None:
        """Ends the requests with ``error``."""
        self.subscription.fail(error)

    def finish(self, index: int) -> None:
        """Aborts one sequence."""
        self._unfinished.discard(index)
        self.subscription.finish(index)
