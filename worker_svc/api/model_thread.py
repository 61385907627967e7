"""The only thread that uses the model: the event loop stays responsive while the device works.

A second thread waits for a device that runs ahead, so the first can launch meanwhile.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from protos.service.logs import get_logger

R = TypeVar("R")

MODEL_THREAD = "model"
"""The thread's name."""
WAITING_THREAD = "device-wait"
"""The name of the thread that waits for the device."""


@dataclass(frozen=True)
class Running:
    """A running function, as of its start or its last progress."""

    what: str
    """The function's kind, in a word for people."""
    limit_s: float
    """Seconds without progress before the process counts as hung; 0: any time."""
    since: float
    """The monotonic time of its start or its last progress."""


@dataclass(frozen=True)
class _Task:
    function: Callable[[], Any]
    future: "asyncio.Future[Any] | None"
    what: str
    limit_s: float

    def running(self) -> Running:
        return Running(self.what, self.limit_s, time.monotonic())


class ModelThread:
    """Runs functions one at a time, in the order of their submission.

    A compute library ties its thread pool to its first thread, so even the imports run here. The thread is a
    daemon: a stopping process does not wait for a half-loaded model.

    A function may defer its wait for the device to a second thread. This thread starts with the first
    deferral, and also runs one function at a time, in order.
    """

    def __init__(self) -> None:
        """Starts the thread. Requires a running event loop."""
        self._loop = asyncio.get_running_loop()
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._task: _Task | None = None
        self._running: Running | None = None
        self._deferred: queue.Queue[tuple[Callable[[], object], _Task] | None] = queue.Queue()
        self._waiting: Running | None = None
        self._waiting_thread: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name=MODEL_THREAD, daemon=True)
        self._thread.start()

    @property
    def running(self) -> Running | None:
        """The running function or deferred part; `None` if neither runs. A new object after each progress."""
        # A deferred part is older than the running function.
        return self._waiting or self._running

    @property
    def busy_s(self) -> float:
        """Seconds since the start or the last progress of the running function; 0 if none runs."""
        running = self.running
        return 0.0 if running is None else time.monotonic() - running.since

    def progressed(self) -> None:
        """Reports progress; long-running functions on this thread call it after each of their steps."""
        if self._task is not None:
            self._running = self._task.running()

    def submit(
        self, function: Callable[[], R], *, what: str = "call", limit_s: float = 0.0
    ) -> "asyncio.Future[R]":
        """Queues a function and returns a future of its result; for `what` and `limit_s` see `Running`.

        Cancelling the future does not stop the function.
        """
        future: asyncio.Future[R] = self._loop.create_future()
        self._tasks.put(_Task(function, future, what, limit_s))
        return future

    def post(self, function: Callable[[], object], *, what: str, limit_s: float) -> None:
        """Queues a function, which must not raise. Safe on any thread; see `submit` for the arguments."""
        self._tasks.put(_Task(function, None, what, limit_s))

    def defer(self, function: Callable[[], object]) -> None:
        """Queues the rest of the running function, a wait for the device. Its errors are only logged.

        Call it on this thread. The rest is of the running function's kind and limit.
        """
        assert self._task is not None
        if self._waiting_thread is None:
            self._waiting_thread = threading.Thread(target=self._wait, name=WAITING_THREAD, daemon=True)
            self._waiting_thread.start()
        self._deferred.put((function, self._task))

    def settle(self) -> None:
        """Waits for all deferred functions. Call it on this thread."""
        self._deferred.join()

    async def close(self, wait_s: float) -> None:
        """Ends both threads after the queued functions; waits for them at most `wait_s` seconds."""
        self._tasks.put(None)
        deadline = time.monotonic() + wait_s
        for thread in filter(None, (self._thread, self._waiting_thread)):
            await asyncio.to_thread(thread.join, max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._task, self._running = task, task.running()
            result, error = None, None
            try:
                result = task.function()
            except BaseException as raised:  # noqa: BLE001 - any exception goes to the caller
                error = raised
            self._task, self._running = None, None
            if task.future is None:
                continue
            try:
                self._loop.call_soon_threadsafe(_settle, task.future, result, error)
            except RuntimeError:
                return  # the loop is closed, so the process is ending
        self._deferred.put(None)

    def _wait(self) -> None:
        while (deferred := self._deferred.get()) is not None:
            function, task = deferred
            self._waiting = task.running()
            try:
                function()
            except BaseException:  # noqa: BLE001 - a fault in this program, or a library that calls sys.exit
                # Without this thread no later step would be answered. The scheduler gives this one up.
                if not self._loop.is_closed():
                    get_logger().exception("deferred_failed", what=task.what)
            finally:
                self._waiting = None
                self._deferred.task_done()


def _settle(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if future.done():
        return  # cancelled
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
