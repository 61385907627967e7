"""Clients of a scheduler, their requests, and a reader of their events as tests want them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from gateway.scheduler_client.client import InferenceClient
from gateway.scheduler_client.in_flight import PendingRequest, SequenceEvent, Subscription
from protos.errors import TriptychError
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference


def request(name: str = "r", max_tokens: int = 20) -> inference.GenerateRequest:
    """Returns a request for exactly ``max_tokens`` tokens."""
    return inference.GenerateRequest(
        request_id=name,
        prompt_token_ids=[7, 8],
        sampling=pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
    )


def pool_request(name: str = "p", num_tokens: int = 2) -> inference.PoolRequest:
    return inference.PoolRequest(request_id=name, prompt_token_ids=[5] * num_tokens)


@contextlib.asynccontextmanager
async def started(port: int, *, connected: bool = False, **options: Any) -> AsyncIterator[InferenceClient]:
    """Runs a client with these options; waits until it is ``connected``, if that is wanted."""
    client = InferenceClient(f"127.0.0.1:{port}", **{"resume_timeout_s": 10.0, **options})
    up = asyncio.Event()
    client.on_connect(up.set)
    await client.start()
    try:
        if connected:
            await asyncio.wait_for(up.wait(), 10)
        yield client
    finally:
        await client.close()


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

    def push_token(self, index: int, token_id: int) -> None:
        """Keeps a token."""
        self.push([(index, token_id)])

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


async def tokens_of(group: EventReader) -> list[list[int]]:
    """Returns all tokens of each request, in order."""
    found: list[list[int]] = [[] for _ in group.requests]
    async with asyncio.timeout(20):
        while events := await group.take():
            for index, event in events:
                found[index].extend(event.token_ids)
    return found
