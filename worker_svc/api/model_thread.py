"""The one thread that uses the model, so that the event loop stays responsive while the device works."""

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
    """Runs functions one at a time, in the order of their submission.

    A compute library ties its thread pool to the thread that first uses it, so even the imports run here. The
    thread is a daemon: a stopping process does not wait for a half-loaded model.
    """

    def __init__(self) -> None:
        """Starts the thread. Requires a running event loop."""
        self._loop = asyncio.get_running_loop()
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name=MODEL_THREAD, daemon=True)
        self._thread.start()

    @property
    def busy_s(self) -> float:
        """Seconds since the running function started or last reported progress; 0 if none runs."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def progressed(self) -> None:
        """Reports progress; a long-running function on this thread calls it after each of its steps."""
        self._busy_since = time.monotonic()

    def submit(self, function: Callable[[], R]) -> "asyncio.Future[R]":
        """Queues a function and returns a future for its result or exception.

        Cancelling the future does not stop the function.
        """
        future: asyncio.Future[R] = self._loop.create_future()
        self._tasks.put((function, future))
        return future

    async def close(self, wait_s: float) -> None:
        """Ends the thread after the queued functions; waits for it at most `wait_s` seconds."""
        self._tasks.put(None)
        await asyncio.to_thread(self._thread.join, wait_s)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            function, future = task
            self._busy_since = time.monotonic()
            result, error = None, None
            try:
                result = function()
            except BaseException as raised:  # noqa: BLE001 - any exception goes to the caller
                error = raised
            self._busy_since = None
            try:
                self._loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:
                return  # the loop is closed, so the process is ending


def _settle(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if future.done():
        return  # cancelled
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
