"""The buffer between the step loops and a stream's writer."""

import asyncio
from collections.abc import Callable

import pytest

from protos.errors import Overloaded
from protos.service.backpressure import UnreadLimits
from protos.triptych.v1 import common_pb2
from scheduler_svc.api.events import EventBuffer
from scheduler_svc.requests.request import Event


def make_buffer(per_reader: int = 100_000, abort: Callable[[], None] = lambda: None) -> EventBuffer:
    return EventBuffer(UnreadLimits(per_reader=per_reader, total=10**6, flags=("--one", "--all")), abort)


async def test_tokens_in_columns_hold_a_client_back_too() -> None:
    """The bound counts tokens, not entries, and a take starts the count again."""
    buffer = make_buffer()
    buffer.push_tokens([str(index) for index in range(5000)], range(5000))
    waiting = asyncio.create_task(buffer.has_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    assert len(await buffer.take()) == 1
    await waiting
    buffer.push_tokens(["a"], [5])
    await buffer.has_room()


async def test_a_writer_holds_a_bounded_part() -> None:
    """It takes much in parts, in order, so that the rest can be dropped while it waits for its client."""
    buffer = make_buffer()
    for index in range(50_000):
        buffer.push_tokens(["a"], [index])
    sizes: list[int] = []
    tokens: list[int] = []
    while len(tokens) < 50_000:
        part = await buffer.take()
        sizes.append(len(part))
        tokens += [entry[1][0] for entry in part if isinstance(entry, tuple)]
    assert max(sizes) < 20_000
    assert tokens == list(range(50_000))


async def test_a_large_entry_leaves_nothing_to_take() -> None:
    """The next take waits for more."""
    buffer = make_buffer()
    buffer.push_tokens(["a"] * 20_000, range(20_000))
    assert len(await buffer.take()) == 1
    following = asyncio.ensure_future(buffer.take())
    await asyncio.sleep(0)
    assert not following.done()
    buffer.push_tokens(["a"], [1])
    assert len(await following) == 1


async def test_what_a_writer_has_taken_counts_until_it_comes_again() -> None:
    """A client that reads nothing keeps the writer from its next take."""
    limits = UnreadLimits(per_reader=100, total=1000, flags=("--one", "--all"))
    buffer = EventBuffer(limits, lambda: None)
    buffer.push_tokens(["a"] * 60, range(60))
    await buffer.take()
    assert limits.num_tokens == 60
    buffer.wake()
    await buffer.take()
    assert limits.num_tokens == 0


@pytest.mark.parametrize(
    "event",
    [
        Event("a", tuple(range(101))),
        Event("a", (1,), logprobs=[common_pb2.TokenLogprobs(top_token_ids=[1] * 20)] * 5),
        Event("a", prompt_logprobs=[common_pb2.TokenLogprobs(top_token_ids=[1] * 20)] * 5),
    ],
)
async def test_the_end_of_a_slow_stream(event: Event) -> None:
    """Everything that waits is dropped and its requests are aborted, after the step that brought too much."""
    aborted = []
    buffer = make_buffer(100, lambda: aborted.append(True))
    buffer.push(event)
    assert not aborted
    await asyncio.sleep(0)
    assert aborted
    buffer.push(Event("b", (1,)))
    with pytest.raises(Overloaded, match="--one"):
        await buffer.take()
    with pytest.raises(Overloaded, match="--one"):
        await buffer.has_room()
