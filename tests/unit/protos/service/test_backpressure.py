"""Bounds on what waits for slow readers."""

import asyncio

from protos.errors import TriptychError
from protos.service.backpressure import UnreadLimits


class _Reader:
    def __init__(self, limits: UnreadLimits) -> None:
        self.errors: list[TriptychError] = []
        self.count = limits.reader(self.errors.append)


async def test_the_slowest_reader_makes_room_for_all() -> None:
    limits = UnreadLimits(per_reader=100, total=150, flags=("--one", "--all"))
    readers = [_Reader(limits) for _ in range(3)]
    for reader, num in zip(readers, (50, 90, 10), strict=True):
        reader.count.add(num)
    readers[2].count.add(1)
    await asyncio.sleep(0)
    assert [len(reader.errors) for reader in readers] == [0, 1, 0]
    assert "90 tokens of it and 151 of all clients wait (--all)" in readers[1].errors[0].message
    assert (limits.num_tokens, limits.num_ended) == (61, 1)


async def test_a_reader_that_ends_counts_no_more() -> None:
    """It ends once, whatever else comes for it."""
    limits = UnreadLimits(per_reader=100, total=1000, flags=("--one", "--all"))
    reader = _Reader(limits)
    for _ in range(3):
        reader.count.add(101)
    reader.count.remove(101)
    await asyncio.sleep(0)
    assert len(reader.errors) == 1
    assert (limits.num_tokens, limits.num_ended, limits.behind) == (0, 1, set())


async def test_what_is_read_or_left_counts_no_more() -> None:
    """Nothing is kept of a reader that has read everything, or that is gone."""
    limits = UnreadLimits(per_reader=100, total=1000, flags=("--one", "--all"))
    fast, gone = _Reader(limits), _Reader(limits)
    fast.count.add(70)
    gone.count.add(80)
    fast.count.remove(70)
    gone.count.close()
    assert (limits.num_tokens, limits.behind) == (0, set())
    fast.count.add(70)
    await asyncio.sleep(0)
    assert not fast.errors
