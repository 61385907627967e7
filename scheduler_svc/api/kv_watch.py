"""One follower of the KV events of all replicas, those that come later included."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from protos.errors import Unavailable
from scheduler_svc.dispatch.engine import Engine
from scheduler_svc.kv.events import Batch

# Batches that a slow watcher may leave lying.
_MAX_BEHIND = 10_000


class KvWatch:
    """Buffers batches between the step loops and one stream.

    A watcher that does not keep up is cut off rather than given a stream with holes: it watches again from the last number it has.
    """

    def __init__(
        self, engine: Engine, *, replica_id: str = "", after: int = 0, max_behind: int = _MAX_BEHIND
    ) -> None:
        """Follows ``replica_id`` from behind batch ``after``, the others (or all) from a snapshot."""
        self._engine = engine
        self._replica_id = replica_id
        self._after = after
        self._max_behind = max_behind
        self._batches: list[tuple[str, Batch]] = []
        self._behind = False
        self._filled = asyncio.Event()

    @contextlib.contextmanager
    def open(self) -> Iterator[AsyncIterator[tuple[str, Batch]]]:
        """While open, batches gather; gives them one by one, as (replica id, batch)."""
        with contextlib.ExitStack() as stack:

            def follow(replica_id: str) -> None:
                after = self._after if replica_id == self._replica_id else 0
                events = self._engine.replicas[replica_id].scheduler.kv.events
                stack.callback(events.follow(lambda batch: self._add(replica_id, batch), after))

            for replica_id in self._engine.replicas:
                follow(replica_id)
            self._engine.attach_listeners.append(follow)
            stack.callback(self._engine.attach_listeners.remove, follow)
            yield self._each()

    def _add(self, replica_id: str, batch: Batch) -> None:
        # Counted here: a watcher that does not read at all never comes to ask for more.
        self._behind = self._behind or len(self._batches) >= self._max_behind
        if self._behind:
            self._batches.clear()
        else:
            self._batches.append((replica_id, batch))
        self._filled.set()

    async def _each(self) -> AsyncIterator[tuple[str, Batch]]:
        while True:
            await self._filled.wait()
            self._filled.clear()
            batches, self._batches = self._batches, []
            if self._behind:
                raise Unavailable(
                    f"more than {self._max_behind} batches of KV events were not read in time; watch again",
                    retry_after_ms=100,
                )
            for entry in batches:
                yield entry
