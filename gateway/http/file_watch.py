"""Notices that files have changed."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

# Polling sees what notifications of the kernel miss: network file systems, and links that Kubernetes swaps.
POLL_S: Final = 1.0


class FileWatch:
    """Calls a function when one of some files has changed since the watch was made."""

    def __init__(self, paths: Sequence[Path], on_change: Callable[[], None]) -> None:
        """Remembers the files as they are.

        Args:
            paths: files; they may be missing.
            on_change: called after a change; must not raise.
        """
        self._paths = paths
        self._on_change = on_change
        self._seen = self._state()

    def _state(self) -> list[tuple[int, int, int] | None]:
        return [_state_of(path) for path in self._paths]

    def check(self) -> None:
        """Looks once."""
        now = self._state()
        if now != self._seen:
            self._seen = now
            self._on_change()

    async def run(self) -> None:
        """Looks every second, for ever; returns at once if there are no files."""
        while self._paths:
            await asyncio.sleep(POLL_S)
            self.check()


def _state_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
