"""Files that are read again when they change."""

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from protos.errors import ConfigurationRefused
from protos.logs import get_logger

T = TypeVar("T")


class WatchedFiles(Generic[T]):
    """The content of some files, as a value. Any thread may read it."""

    version: int
    """Grows whenever the content has changed."""

    def __init__(self, paths: tuple[Path, ...], read: Callable[[], T]) -> None:
        """Reads the files.

        Args:
            paths: the files that may change.
            read: reads them.

        Raises:
            ConfigurationRefused: as `read` does.
        """
        self.version = 0
        self._paths = paths
        self._read = read
        self._seen = self._state()
        self._value = read()
        self._log = get_logger(files=[str(path) for path in paths])

    def have_changed(self) -> bool:
        """Whether :meth:`get` would read the files."""
        return self._state() != self._seen

    def get(self) -> T:
        """Returns the content. Files that are bad now, such as half of a new pair, do not replace it."""
        state = self._state()
        if state != self._seen:
            self._seen = state
            try:
                self._value = self._read()
            except ConfigurationRefused as error:
                self._log.warning("files_not_reloaded", reason=error.message, using="what they held before")
            else:
                self.version += 1
                self._log.info("files_reloaded")
        return self._value

    def _state(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_state_of, self._paths))


def _state_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def read_bytes(path: Path, flag: str) -> bytes:
    """Returns a file's content.

    Raises:
        ConfigurationRefused: it cannot be read; names the flag.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationRefused(f"{flag}: cannot read {path}: {error.strerror}") from error
