"""Finds out that a stream has written nothing for a time. Each of its writes costs a time stamp."""

import asyncio
from collections.abc import Callable


class IdleWatch:
    """Calls a function whenever ``after_s`` seconds have passed without a write, until it is stopped."""

    __slots__ = ("_after_s", "_loop", "_on_idle", "_timer", "_wrote_s")

    def __init__(self, after_s: float, on_idle: Callable[[], None]) -> None:
        """Starts to watch.

        Args:
            after_s: seconds.
            on_idle: what to call.
        """
        self._after_s = after_s
        self._on_idle = on_idle
        self._loop = asyncio.get_running_loop()
        self._wrote_s = self._loop.time()
        self._timer = self._loop.call_later(after_s, self._check)

    def wrote(self) -> None:
        """Notes a write."""
        self._wrote_s = self._loop.time()

    def noting(self, write: Callable[[bytes], None]) -> Callable[[bytes], None]:
        """Returns ``write``, its calls noted."""

        def noted(part: bytes) -> None:
            write(part)
            self.wrote()

        return noted

    def stop(self) -> None:
        """Ends the watch."""
        self._timer.cancel()

    def _check(self) -> None:
        # One timer an interval, however many writes there are: it is set again for what is left.
        left = self._wrote_s + self._after_s - self._loop.time()
        if left <= 0:
            self.wrote()
            self._on_idle()
            left = self._after_s
        self._timer = self._loop.call_later(left, self._check)
