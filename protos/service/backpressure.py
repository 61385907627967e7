"""Bounds on unread output: for each reader, and for all together.

Readers are clients' streams in the scheduler and answers to HTTP requests in the gateway. Output is counted
in tokens; each log-probability counts as another token.
"""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Final

from protos.errors import Overloaded, TriptychError

_RETRY_AFTER_MS: Final = 1000

TENANT: Final = ContextVar("TENANT", default="")
"""The tenant of the task's request, for bounds per tenant."""


class UnreadLimits:
    """The bounds, and all readers with unread output."""

    num_tokens: int
    """Unread tokens of all readers."""
    behind: "set[UnreadTokens]"
    """The readers with unread output."""
    num_ended: int
    """Readers ended for being too slow."""

    def __init__(self, *, per_reader: int, total: int, flags: tuple[str, str], unit: str = "tokens") -> None:
        """Starts without readers.

        Args:
            per_reader: most unread tokens of a reader.
            total: most unread tokens of all readers. Beyond it, the slowest reader is ended.
            flags: the settings' flags, for errors.
            unit: the unit of all counts.
        """
        self.num_tokens = 0
        self.num_ended = 0
        self.per_reader = per_reader
        self.total = total
        self._flags = flags
        self._unit = unit
        self.behind = set()

    def reader(self, on_end: Callable[[TriptychError], None]) -> "UnreadTokens":
        """Returns the count of a new reader.

        `on_end` is called from the event loop when the reader is ended. It must drop all unread output.
        """
        return UnreadTokens(self, on_end)

    def check(self, last: "UnreadTokens") -> None:
        """Ends a reader if a bound is exceeded; `last` is the reader with new output."""
        if last.num > self.per_reader:
            self._end(last, f"more than {self.per_reader} {self._unit} of it wait", self._flags[0])
        elif self.num_tokens > self.total:
            slowest = max(self.behind, key=lambda reader: reader.num)
            detail = f"{slowest.num} {self._unit} of it and {self.num_tokens} of all clients wait"
            self._end(slowest, detail, self._flags[1])

    def _end(self, reader: "UnreadTokens", detail: str, flag: str) -> None:
        self.num_ended += 1
        reader.close()
        error = Overloaded(
            f"the client reads too slowly: {detail} ({flag}); read faster, or ask for less at a time",
            retry_after_ms=_RETRY_AFTER_MS,
        )
        # The tokens may come in the middle of a scheduler's step, where no request may be aborted.
        asyncio.get_running_loop().call_soon(reader.on_end, error)


class UnreadTokens:
    """Counts a reader's unread output."""

    __slots__ = ("_limits", "closed", "num", "on_end")

    num: int
    """Unread tokens."""
    closed: bool
    """Whether the reader reads no more; then nothing is counted."""
    on_end: Callable[[TriptychError], None]
    """Called when the reader is ended."""

    def __init__(self, limits: UnreadLimits, on_end: Callable[[TriptychError], None]) -> None:
        self.num = 0
        self.closed = False
        self.on_end = on_end
        self._limits = limits

    def add(self, num_tokens: int) -> None:
        """Counts unread tokens; may end a reader."""
        if self.closed:
            return
        limits = self._limits
        if not self.num:
            limits.behind.add(self)
        self.num += num_tokens
        limits.num_tokens += num_tokens
        if self.num > limits.per_reader or limits.num_tokens > limits.total:
            limits.check(self)

    def remove(self, num_tokens: int) -> None:
        """Counts tokens as read."""
        if self.closed:
            return
        self.num -= num_tokens
        self._limits.num_tokens -= num_tokens
        if not self.num:
            self._limits.behind.discard(self)

    def set(self, num_tokens: int) -> None:
        """Replaces the count; may end a reader."""
        if (more := num_tokens - self.num) > 0:
            self.add(more)
        else:
            self.remove(-more)

    def close(self) -> None:
        """Forgets the reader and its unread output."""
        self.remove(self.num)
        self.closed = True
