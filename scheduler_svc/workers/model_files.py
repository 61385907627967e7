"""The served model with its tokenizer files, as the first worker provided them."""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protos.errors import Internal
from scheduler_svc.workers.descriptions import ModelDescription

# Far above the needs of any real tokenizer. Every client that reaches the registry's port may register a
# worker.
MAX_FILES = 64
MAX_TOTAL_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ServedFiles:
    """The model that a deployment serves, for gateways."""

    name: str
    """The name that answers and metrics have."""
    aliases: tuple[str, ...]
    """Further names that requests may use."""
    model: ModelDescription
    max_model_len: int
    """Longest sequence that the deployment serves, tokens."""
    created_unix_s: int
    """Seconds since the epoch when the first replica was ready."""
    tokenizer_sha256: str
    """Hash over the names and contents of the tokenizer files, hexadecimal."""
    files: Mapping[str, bytes]
    """Tokenizer files by name."""


class FileReceiver:
    """Joins the pieces of streamed files."""

    def __init__(self) -> None:
        self._files: dict[str, bytearray] = {}
        self._open = ""
        self._total = 0

    def add(self, name: str, data: bytes, *, last: bool) -> None:
        """Adds the next piece; `last` ends a file.

        Raises:
            Internal: the name is not a plain file name, or the files are too many or too large.
        """
        # A gateway uses these names as paths.
        if not name or name.startswith(".") or any(sign in name for sign in "/\\\0"):
            raise Internal(f"the worker sent a file called {name!r}; only plain file names are accepted")
        self._files.setdefault(name, bytearray()).extend(data)
        self._total += len(data)
        if self._total > MAX_TOTAL_BYTES or len(self._files) > MAX_FILES:
            raise Internal(
                f"the worker sent more than {MAX_FILES} files or {MAX_TOTAL_BYTES >> 20} MiB of tokenizer files"
            )
        self._open = "" if last else name

    def files(self) -> dict[str, bytes]:
        """Returns the complete files by name.

        Raises:
            Internal: the stream ended within a file.
        """
        if self._open:
            raise Internal(f"the worker's stream ended within {self._open}")
        return {name: bytes(data) for name, data in self._files.items()}


def describe_served(
    model: ModelDescription, files: Mapping[str, bytes], *, served_names: Sequence[str], max_model_len: int,
) -> ServedFiles:  # fmt: skip
    """Completes a worker's description of its model with what the deployment decides."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + len(files[name]).to_bytes(8, "little") + files[name])
    return ServedFiles(
        name=served_names[0] if served_names else model.source,
        aliases=tuple(dict.fromkeys(name for name in served_names[1:] if name != served_names[0])),
        model=model,
        max_model_len=max_model_len,
        created_unix_s=int(time.time()),
        tokenizer_sha256=digest.hexdigest(),
        files=files,
    )
