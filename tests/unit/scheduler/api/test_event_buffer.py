"""The buffer between the step loops and a stream's writer."""

import asyncio

from scheduler_svc.api.event_buffer import EventBuffer
from scheduler_svc.requests.request import Event


async def test_a_client_that_does_not_read_is_held_back() -> None:
    """Beyond a bound of unread events, the stream accepts no more messages until the client reads."""
    buffer = EventBuffer()
    for index in range(10_000):
        buffer.push(Event(str(index)))
    waiting = asyncio.create_task(buffer.has_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    assert len(await buffer.take()) == 10_000
    await waiting
    await buffer.has_room()


async def test_a_take_returns_everything_pushed_since_the_last_one() -> None:
    """Events and plain tokens leave together and in order."""
    buffer = EventBuffer()
    buffer.push_tokens(["a", "c"], [5, 8])
    buffer.push(Event("b", (6,)))
    assert await buffer.take() == [(["a", "c"], [5, 8]), Event("b", (6,))]
    buffer.wake()
    assert await buffer.take() == []


async def test_tokens_in_columns_hold_a_client_back_too() -> None:
    """The bound counts tokens, not entries, and a take starts the count again."""
    buffer = EventBuffer()
    buffer.push_tokens([str(index) for index in range(5000)], range(5000))
    waiting = asyncio.create_task(buffer.has_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    assert len(await buffer.take()) == 1
    await waiting
    buffer.push_tokens(["a"], [5])
    await buffer.has_room()
