"""The one thread that uses the model, so that the event loop stays responsive while the device works."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

R = TypeVar("R")

MODEL_THREAD = "model"
"""The thread's name."""


@dataclass(frozen=True)
class Running:
    """A running function, as of its start or its last progress."""

    what: str
    """The function's kind, in a word for people."""
    limit_s: float
    """How long it may run without progress before the process counts as hung, seconds; 0: any time."""
    since: float
    """The monotonic time of its start or its last progress."""


@dataclass(frozen=True)
class _Task:
    function: Callable[[], Any]
    future: "asyncio.Future[Any]"
    what: str
    limit_s: float

    def running(self) -> Running:
        return Running(self.what, self.limit_s, time.monotonic())


class ModelThread:
    """Runs functions one at a time, in the order of their submission.

    A compute library ties its thread pool to the thread that first uses it, so even the imports run here. The
    thread is a daemon: a stopping process does not wait for a half-loaded model.
    """

    def __init__(self) -> None:
        """Starts the thread. Requires a running event loop."""
        self._loop = asyncio.get_running_loop()
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._task: _Task | None = None
        self._running: Running | None = None
        self._thread = threading.Thread(target=self._run, name=MODEL_THREAD, daemon=True)
        self._thread.start()

    @property
    def running(self) -> Running | None:
        """The running function; `None` if none runs. Another object after each progress."""
        return self._running

    @property
    def busy_s(self) -> float:
        """Seconds since the running function started or last reported progress; 0 if none runs."""
        running = self._running
        return 0.0 if running is None else time.monotonic() - running.since

    def progressed(self) -> None:
        """Reports progress; a long-running function on this thread calls it after each of its steps."""
        if self._task is not None:
            self._running = self._task.running()

    def submit(
        self, function: Callable[[], R], *, what: str = "call", limit_s: float = 0.0
    ) -> "asyncio.Future[R]":
        """Queues a function and returns a future for its result or exception.

        Cancelling the future does not stop the function.

        Args:
            function: runs on this thread.
            what: its kind, for messages.
            limit_s: see `Running`.
        """
        future: asyncio.Future[R] = self._loop.create_future()
        self._tasks.put(_Task(function, future, what, limit_s))
        return future

    async def close(self, wait_s: float) -> None:
        """Ends the thread after the queued functions; waits for it at most `wait_s` seconds."""
        self._tasks.put(None)
        await asyncio.to_thread(self._thread.join, wait_s)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._task, self._running = task, task.running()
            result, error = None, None
            try:
                result = task.function()
            except BaseException as raised:  # noqa: BLE001 - any exception goes to the caller
                error = raised
            self._task, self._running = None, None
            try:
                self._loop.call_soon_threadsafe(_settle, task.future, result, error)
            except RuntimeError:
                return  # the loop is closed, so the process is ending


def _settle(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if future.done():
        return  # cancelled
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
