"""The service token: a secret shared by the services of a deployment."""

import hmac
import re
from pathlib import Path
from typing import Final

from protos.errors import ConfigurationRefused
from protos.security.watched_files import WatchedFiles, read_bytes

# What gRPC's metadata can carry, without spaces. Short ones could be guessed.
_TOKEN: Final = re.compile(rb"[!-~]{16,512}")
_RULE: Final = "a token has 16 to 512 printable ASCII characters and no spaces"

_SCHEME: Final = "Bearer "


class ServiceTokens:
    """A service's accepted tokens; it sends the first."""

    def __init__(self, *, token: str | None = None, file: Path | None = None) -> None:
        """Reads the tokens.

        Args:
            token: the only token.
            file: holds a token per line, and may change. Empty lines and lines with `#` are skipped.

        Raises:
            ConfigurationRefused: the file cannot be read, or a token is malformed. The message names no
                token.
        """
        self._fixed = (_checked(token.encode(), "--service-token"),) if token is not None else ()
        self._file = WatchedFiles((file,), lambda: _read(file)) if file is not None else None

    @property
    def authorization(self) -> str:
        """The value of the `authorization` metadata of calls."""
        return _SCHEME + self._current()[0].decode()

    def accepts(self, authorization: str) -> bool:
        """Whether metadata contains an accepted token; compares in constant time."""
        given = authorization.removeprefix(_SCHEME).encode()
        matches = [hmac.compare_digest(given, token) for token in self._current()]
        return any(matches) and authorization.startswith(_SCHEME)

    def _current(self) -> tuple[bytes, ...]:
        return self._file.get() if self._file is not None else self._fixed


def _read(file: Path) -> tuple[bytes, ...]:
    flag = "--service-token-file"
    lines = [line.strip() for line in read_bytes(file, flag).splitlines()]
    tokens = [line for line in lines if line and not line.startswith(b"#")]
    if not tokens:
        raise ConfigurationRefused(f"{flag}: {file} has no token; write one a line")
    return tuple(_checked(token, f"{flag}: a line of {file}") for token in tokens)


def _checked(token: bytes, where: str) -> bytes:
    if not _TOKEN.fullmatch(token):
        raise ConfigurationRefused(f"{where} is not a valid token: {_RULE}")
    return token
