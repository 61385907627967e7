"""The threads that read LoRA adapters, apart from all other threads of the process."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from protos.errors import Unavailable

R = TypeVar("R")

# Far more than the loads that a scheduler has under way: each source on a disk that hangs keeps one.
_MOST_THREADS = 64


class AdapterThreads:
    """Reads adapters from disks and hubs that may not answer, and holds no other call up meanwhile.

    No thread can be stopped: when a call ends at its deadline, its thread reads on. Until that read ends,
    further reads of the same source are refused, so retries of one source take no more threads.
    """

    def __init__(self) -> None:
        """Starts without threads."""
        self._pool = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="adapters")
        # Sources whose reads have outlived their calls.
        self._abandoned: list[tuple[str, Future[Any]]] = []

    async def run(self, name: str, source: str, read: Callable[[], R]) -> R:
        """Runs `read` on a thread and returns its result. A cancelled call abandons a read that has begun.

        Args:
            name: the adapter's, for errors.
            source: what it reads.
            read: reads the adapter.

        Raises:
            Unavailable: if an abandoned read of the source has not ended.
            Exception: what `read` raises.
        """
        self._abandoned = [one for one in self._abandoned if not one[1].done()]
        if any(source == each for each, _ in self._abandoned):
            raise Unavailable(
                f"adapter {name}: an earlier read of {source} hangs; retry once its disk or hub answers",
                retry_after_ms=5000,
            )
        reading = self._pool.submit(read)
        try:
            return await asyncio.wrap_future(reading)
        except asyncio.CancelledError:
            if not reading.cancel():
                self._abandoned.append((source, reading))
            raise

    def close(self) -> None:
        """Lets the threads end, without waiting for them."""
        self._pool.shutdown(wait=False, cancel_futures=True)
