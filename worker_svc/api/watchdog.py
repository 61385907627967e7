"""Ends a worker whose model thread hangs or whose steps keep failing: its supervisor starts a new process."""

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

from protos.service.logs import get_logger
from protos.steps import StepResult
from protos.triptych.v1 import common_pb2
from worker_svc.api.model_thread import MODEL_THREAD, WAITING_THREAD, ModelThread, Running

EXIT_CODE = 1
"""The exit code of a worker that ended itself. 2 would mean a bad setting."""
STEP = "step (--hang-timeout-s)"
"""The kind of the functions that run plans; see `Running.what`."""
_LONGEST_INTERVAL_S = 1.0
# Time left to a step given up by the scheduler: a frozen process may go on.
_GIVEN_UP_S = 3.0
# An unread log, such as a full pipe, must not keep a hung process alive.
_REPORT_S = 2.0
# Errors caused by a request, not by the device.
_OF_A_REQUEST = (
    common_pb2.ERROR_CODE_INVALID_ARGUMENT,
    common_pb2.ERROR_CODE_UNSUPPORTED,
    common_pb2.ERROR_CODE_CONTEXT_EXCEEDED,
)


class WorkerFailed(Exception):  # noqa: N818 - a state, not an error
    """The worker cannot go on and ends. The text is one line for people."""


class FailedSteps:
    """Counts failed steps in a row."""

    def __init__(self, limit: int, on_limit: Callable[[WorkerFailed], object]) -> None:
        """Calls `on_limit` at `limit` failed steps in a row, and at each further one; 0: never."""
        self._limit = limit
        self._on_limit = on_limit
        self._count = 0

    def note(self, result: StepResult) -> None:
        """Counts a step's result. Always called on the same thread."""
        if result.error is not None and result.error.code in _OF_A_REQUEST:
            return  # the device is not at fault
        if result.error is not None:
            self._count += 1
            if self._limit and self._count >= self._limit:
                self._on_limit(
                    WorkerFailed(
                        f"{self._count} steps failed in a row, the last with: {result.error.message};"
                        " the worker ends, so that its supervisor starts another (--max-failed-steps)"
                    )
                )
        elif result.num_steps:
            # A plan without steps proves nothing about the device.
            self._count = 0


class Watchdog:
    """Ends the process when the model thread exceeds its function's time without progress.

    It is a separate thread, because the event loop may hang as well. It adds up the time between its own
    looks, so a freeze of the whole process shorter than the limit does not count. If the model thread hangs
    in native code and holds the interpreter's lock, no Python code runs any more; then a timer of the
    interpreter, which needs no lock, ends the process.
    """

    def __init__(
        self, thread: ModelThread, *, longest_s: float, give_up: Callable[[str], None] | None = None
    ) -> None:
        """Starts watching.

        Args:
            thread: the model thread.
            longest_s: the longest limit of a function, for the timer while no function runs; 0 for no timer.
            give_up: called once with the reason. Default: ends the process.
        """
        self._thread = thread
        self._longest_s = longest_s
        self._give_up = give_up or end_process
        self._closed = threading.Event()
        # The step given up by the scheduler.
        self._given_up: Running | None = None
        self._watching = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._watching.start()

    def give_step_up(self) -> None:
        """Leaves the running step a few seconds: the scheduler no longer waits for it."""
        running = self._thread.running
        if running is not None and running.what == STEP and running.limit_s:
            self._given_up = running

    def close(self) -> None:
        """Stops watching."""
        self._closed.set()
        self._watching.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        seen: Running | None = None
        silent_s, interval_s, looked = 0.0, 0.0, time.monotonic()
        shortened: tuple[Running, float] | None = None
        while not self._closed.wait(interval_s):
            now, running = time.monotonic(), self._thread.running
            # A longer wait than asked for means that the process was frozen.
            silent_s = silent_s + min(now - looked, 2 * interval_s) if running is seen else 0.0
            seen, looked = running, now
            limit_s = running.limit_s if running else self._longest_s
            if running is not None and running is self._given_up:
                if shortened is None or shortened[0] is not running:
                    shortened = running, silent_s + _GIVEN_UP_S
                limit_s = min(limit_s, shortened[1])
            if running and limit_s and silent_s > limit_s:
                self._give_up(
                    f"there was no progress for {silent_s:.3g} s in a {running.what};"
                    " the worker ends, so that its supervisor starts another"
                )
                return
            interval_s = min(_LONGEST_INTERVAL_S, limit_s / 4) if limit_s else _LONGEST_INTERVAL_S
            if limit_s:
                faulthandler.dump_traceback_later(limit_s + 2 * _LONGEST_INTERVAL_S, exit=True)
            else:
                faulthandler.cancel_dump_traceback_later()


def end_process(reason: str) -> None:
    """Logs the reason and the model thread's stack, prints the reason as a line, and exits at once."""

    def report() -> None:
        stack = _stack_of(MODEL_THREAD) + _stack_of(WAITING_THREAD)
        get_logger().error("hung", reason=reason, stack=stack)
        sys.stderr.write(f"triptych worker: {reason}\n")
        sys.stderr.flush()

    reporting = threading.Thread(target=report, daemon=True)
    reporting.start()
    reporting.join(_REPORT_S)
    # A normal exit would wait for the device.
    os._exit(EXIT_CODE)


def _stack_of(name: str) -> str:
    """Returns the stack of a thread; empty without such a thread."""
    frames = sys._current_frames()  # noqa: SLF001 - the documented way to see another thread's stack
    for thread in threading.enumerate():
        if thread.name == name and thread.ident in frames:
            return "".join(traceback.format_stack(frames[thread.ident]))
    return ""
