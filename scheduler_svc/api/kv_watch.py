"""The buffer between the prefix caches of all replicas and one WatchKvEvents stream."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

from protos.errors import Unavailable
from scheduler_svc.dispatch.prefix_control import KvChange

# Unread batches beyond which a watcher is cut off.
_MAX_BEHIND = 10_000

Follow = Callable[[Callable[[KvChange], None]], Callable[[], None]]
"""Subscribes a listener and returns a function that ends the subscription."""


@contextlib.contextmanager
def watch_kv_events(follow: Follow, *, max_behind: int = _MAX_BEHIND) -> Iterator[AsyncIterator[KvChange]]:
    """Buffers changes while the block runs and yields an iterator over them.

    A watcher that reads too slowly gets an error rather than a stream with gaps; it can resume from the last
    batch that it has.

    Args:
        follow: subscribes to the changes; see
            :meth:`scheduler_svc.dispatch.prefix_control.PrefixControl.follow`.
        max_behind: unread batches beyond which the iterator raises :class:`protos.errors.Unavailable`.
    """
    buffer = _ChangeBuffer(max_behind)
    stop = follow(buffer.add)
    try:
        yield buffer.changes()
    finally:
        stop()


class _ChangeBuffer:
    def __init__(self, max_behind: int) -> None:
        self._max_behind = max_behind
        self._changes: list[KvChange] = []
        self._behind = False
        self._filled = asyncio.Event()

    def add(self, change: KvChange) -> None:
        # Check the limit here: a watcher that reads nothing never reaches the check in `changes`.
        self._behind = self._behind or len(self._changes) >= self._max_behind
        if self._behind:
            self._changes.clear()
        else:
            self._changes.append(change)
        self._filled.set()

    async def changes(self) -> AsyncIterator[KvChange]:
        while True:
            await self._filled.wait()
            self._filled.clear()
            changes, self._changes = self._changes, []
            if self._behind:
                raise Unavailable(
                    f"more than {self._max_behind} batches of KV events were not read in time; watch again",
                    retry_after_ms=100,
                )
            for change in changes:
                yield change
