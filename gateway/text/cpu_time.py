"""A limit of CPU time for work in Python, such as a chat template that never ends."""

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator
from typing import Final

# Time between two looks at the running work, seconds.
_LOOK_S: Final = 0.5


class OutOfCpuTime(BaseException):
    """Raised within work that takes too long. No handler of ordinary errors catches it."""


class _Work:
    """Work in a thread."""

    def __init__(self, thread: int, limit_s: float) -> None:
        self._thread = thread
        self._clock = time.pthread_getcpuclockid(thread)
        self._end_s = time.clock_gettime(self._clock) + limit_s
        self._lock = threading.Lock()
        self._ended = False

    def check(self) -> None:
        """Interrupts work that is out of time."""
        with self._lock:
            if not self._ended and time.clock_gettime(self._clock) > self._end_s:
                self._ended = True
                _raise_in(self._thread, OutOfCpuTime)

    def end(self, *, was_interrupted: bool) -> None:
        """Ends the limit. An interruption that comes too late must not reach the thread's next work."""
        with self._lock:
            # Taking back nothing hangs a traced thread in Python 3.11, for example under coverage.
            if self._ended and not was_interrupted:
                _raise_in(self._thread, None)
            self._ended = True


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


_running: Final[dict[int, _Work]] = {}
_begun: Final = threading.Event()
_start: Final = threading.Lock()
_watchers: Final[list[threading.Thread]] = []


@contextlib.contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """Limits the CPU time of the work within the context; an outer limit rests meanwhile.

    Raises:
        OutOfCpuTime: within the work.
    """
    thread = threading.get_ident()
    outer = _running.get(thread)
    work = _running[thread] = _Work(thread, limit_s)
    if not _begun.is_set():
        _watch()
    was_interrupted = False
    try:
        yield
    except OutOfCpuTime:
        was_interrupted = True
        raise
    finally:
        if outer is None:
            # A context whose end was interrupted may end late, and remove the entry of the next one.
            _running.pop(thread, None)
        else:
            _running[thread] = outer
        work.end(was_interrupted=was_interrupted)


def _watch() -> None:
    with _start:
        if not _watchers:
            _watchers.append(threading.Thread(target=_look, name="cpu-time", daemon=True))
            _watchers[0].start()
    _begun.set()


def _look() -> None:
    while _begun.wait():
        time.sleep(_LOOK_S)
        _begun.clear()
        for work in list(_running.values()):
            work.check()
        if _running:
            _begun.set()
