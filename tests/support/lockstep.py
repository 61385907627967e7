"""A function on a thread of its own that waits, in the middle, for permission to go on."""

import threading
from collections.abc import Callable


class Dropped(BaseException):
    """Ends a function in the middle: the process that runs it is gone."""


class Lockstep:
    """Runs a function in pieces. Only one of the two threads runs at a time."""

    def __init__(self, function: Callable[[], None]) -> None:
        """Prepares the function; the first `resume` starts it."""
        self.done = False
        self._function = function
        self._dropped = False
        self._error: BaseException | None = None
        self._permission = threading.Semaphore(0)
        self._paused = threading.Semaphore(0)
        threading.Thread(target=self._run, daemon=True).start()

    def resume(self) -> None:
        """Runs the function up to its next `pause` or its end; raises what it raises."""
        self._permission.release()
        self._paused.acquire()
        if self._error is not None:
            raise self._error

    def drop(self) -> None:
        """Ends the function where it waits."""
        self._dropped = True
        self.resume()

    def pause(self) -> None:
        """Waits for the next `resume`; the function calls it."""
        self._paused.release()
        self._permission.acquire()
        if self._dropped:
            raise Dropped

    def _run(self) -> None:
        self._permission.acquire()
        try:
            if not self._dropped:
                self._function()
        except Dropped:
            pass
        except BaseException as error:  # noqa: BLE001 - the other thread raises it
            self._error = error
        self.done = True
        self._paused.release()
