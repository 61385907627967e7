"""The served model with its tokenizer files, as the first worker provided them."""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protos.errors import Internal
from protos.triptych.v1 import common_pb2

# Far above the needs of any real tokenizer. Every client of the registry's port may register a worker.
MAX_FILES = 64
MAX_TOTAL_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of a deployment, for gateways."""

    info: common_pb2.ModelInfo
    """The worker's message, completed by the deployment."""
    weights_digest: str
    """Hash of the weights; empty as long as no worker knows it."""
    files: Mapping[str, bytes]
    """Tokenizer files by name."""

    @property
    def name(self) -> str:
        """The name in answers and metrics."""
        return self.info.served_name


class FileReceiver:
    """Joins the pieces of streamed files."""

    def __init__(self) -> None:
        self._files: dict[str, bytearray] = {}
        self._open = ""
        self._total = 0

    def add(self, name: str, data: bytes, *, last: bool) -> None:
        """Adds the next piece; the `last` ends a file.

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
    model: common_pb2.ModelInfo, files: Mapping[str, bytes], *, served_names: Sequence[str], max_model_len: int,
    weights_digest: str = "",
) -> ServedModel:  # fmt: skip
    """Completes a worker's description of its model; `max_model_len` is the longest sequence of a replica."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + len(files[name]).to_bytes(8, "little") + files[name])
    info = common_pb2.ModelInfo()
    info.CopyFrom(model)
    info.served_name = served_names[0] if served_names else model.source
    info.aliases.extend(dict.fromkeys(name for name in served_names[1:] if name != served_names[0]))
    info.max_model_len = max_model_len
    info.created_unix_s = int(time.time())
    info.tokenizer_sha256 = digest.hexdigest()
    return ServedModel(info, weights_digest, files)
