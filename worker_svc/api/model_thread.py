"""The one thread that touches the model, so that the event loop stays live while the device works."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

R = TypeVar("R")
_Task = tuple[Callable[[], Any], "asyncio.Future[Any]"]

MODEL_THREAD = "model"
"""The thread's name."""


class ModelThread:
    """Runs functions one after the other, in the order of their submission.

    Threads of a compute library belong to the thread that first used it, so everything from the import on happens here. It is a daemon:
    a process that is told to stop does not wait for half a model to load.
    """

    def __init__(self) -> None:
        """Starts the thread; to be called where an event loop runs."""
        self._loop = asyncio.get_running_loop()
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name=MODEL_THREAD, daemon=True)
        self._thread.start()

    @property
    def busy_s(self) -> float:
        """Seconds since the function that runs now began, or last said that it makes progress; 0 if none runs."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def progressed(self) -> None:
        """To be called by a function that runs on this thread whenever one of its many steps is done."""
        self._busy_since = time.monotonic()

    def submit(self, function: Callable[[], R]) -> "asyncio.Future[R]":
        """Queues a function; the future has its result or its exception. Cancelling the future does not stop the function."""
        future: asyncio.Future[R] = self._loop.create_future()
        self._tasks.put((function, future))
        return future

    async def close(self, wait_s: float) -> None:
        """Ends the thread after what is queued, and waits up to ``wait_s`` seconds for that."""
        self._tasks.put(None)
        await asyncio.to_thread(self._thread.join, wait_s)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            function, future = task
            self._busy_since = time.monotonic()
            result, error = None, None
            try:
                result = function()
            except BaseException as raised:  # noqa: BLE001 - whatever it is, it belongs to whoever waits
                error = raised
            self._busy_since = None
            try:
                self._loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:
                return  # the loop is closed: the process ends


def _settle(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if future.done():
        return  # cancelled: nobody waits any more
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
