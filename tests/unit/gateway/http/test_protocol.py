"""Connections of HTTP clients."""

import asyncio
from contextvars import ContextVar
from functools import partial

from gateway.http.protocol import PacedStarts


async def test_a_burst_of_requests_begins_over_several_turns_of_the_loop() -> None:
    """Other work of the loop runs between the starts of a burst, which keep their order."""
    starts, begun, turns = PacedStarts(), list[int](), 0
    for index in range(100):
        starts.add(b"bob", partial(begun.append, index))
    while len(begun) < 100:
        before = len(begun)
        await asyncio.sleep(0)
        turns += 1
        assert len(begun) - before <= 10
    assert begun == list(range(100))
    assert turns >= 10


async def test_a_burst_delays_no_request_with_another_key() -> None:
    """A request begins in the loop's next turn, however many of another key wait."""
    starts, begun = PacedStarts(), list[str]()
    for _ in range(100):
        starts.add(b"bob", partial(begun.append, "bob"))
    starts.add(b"alice", partial(begun.append, "alice"))
    await asyncio.sleep(0)
    assert begun[:2] == ["bob", "alice"]


async def test_a_start_does_not_inherit_the_context_of_another_request() -> None:
    """A pipelined request is added by the end of the answer before, in the context of that request."""
    request_id = ContextVar("request_id", default="")
    starts, seen = PacedStarts(), list[str]()
    request_id.set("of the answer before")
    starts.add(b"bob", lambda: seen.append(request_id.get()))
    starts.add(b"alice", lambda: seen.append(request_id.get()))
    await asyncio.sleep(0)
    assert seen == ["", ""]
