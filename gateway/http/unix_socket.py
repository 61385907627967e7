"""A Unix socket as the gateway's only HTTP address."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

from protos.errors import ConfigurationRefused


@contextlib.contextmanager
def unix_listener(path: Path) -> Iterator[socket.socket]:
    """Yields a socket that listens at ``path``, and removes the file at the end.

    A file that a dead process left is replaced.

    Raises:
        ConfigurationRefused: if the path is in use or cannot be written; one line with the reason.
    """
    if _answers(path):
        raise ConfigurationRefused(f"--uds {path}: another process listens there; choose another path")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with listener:
        try:
            if path.is_socket():
                path.unlink()
            listener.bind(str(path))
            listener.listen(2048)
        except OSError as error:
            raise ConfigurationRefused(
                f"--uds {path}: {error.strerror or error}; choose another path"
            ) from error
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
