"""The served model's description and tokenizer files, as the first worker gave them."""

import hashlib
import time
from collections.abc import AsyncIterable, Callable, Iterator
from dataclasses import dataclass

from protos.errors import Internal
from protos.triptych.v1 import common_pb2
from protos.wire import file_chunks

# Far above any real tokenizer's; whoever reaches the registry's port may register.
MAX_FILES = 64
MAX_TOTAL_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ServedFiles:
    """What gateways ask for.

    Attributes:
        info: complete model description.
        files: tokenizer files by name.
    """

    info: common_pb2.ModelInfo
    files: dict[str, bytes]

    def chunks(self) -> Iterator[common_pb2.FileChunk]:
        """The files, cut into messages."""
        for name, data in self.files.items():
            yield from file_chunks(name, data)


async def receive_files(chunks: AsyncIterable[common_pb2.FileChunk]) -> dict[str, bytes]:
    """Joins streamed files.

    Raises:
        Internal: if a name is not a plain file name, there is far too much, or the stream ended inside a file.
    """
    files: dict[str, bytearray] = {}
    open_name, total = "", 0
    async for chunk in chunks:
        # These names become paths in a gateway.
        if not chunk.name or chunk.name.startswith(".") or any(sign in chunk.name for sign in "/\\\0"):
            raise Internal(
                f"the worker sent a file called {chunk.name!r}; only plain file names are accepted"
            )
        files.setdefault(chunk.name, bytearray()).extend(chunk.data)
        total += len(chunk.data)
        if total > MAX_TOTAL_BYTES or len(files) > MAX_FILES:
            raise Internal(
                f"the worker sent more than {MAX_FILES} files or {MAX_TOTAL_BYTES >> 20} MiB of tokenizer files"
            )
        open_name = "" if chunk.last else chunk.name
    if open_name:
        raise Internal(f"the worker's stream ended within {open_name}")
    return {name: bytes(data) for name, data in files.items()}


def describe_served(
    worker_model: common_pb2.ModelInfo, files: dict[str, bytes], *, served_name: str | None, max_model_len: int,
    now: Callable[[], float] = time.time,
) -> ServedFiles:  # fmt: skip
    """Completes a worker's model description with what the deployment decides."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + len(files[name]).to_bytes(8, "little") + files[name])
    info = common_pb2.ModelInfo()
    info.CopyFrom(worker_model)
    info.served_name = served_name or worker_model.source
    info.max_model_len = max_model_len
    info.created_unix_s = int(now())
    info.tokenizer_sha256 = digest.hexdigest()
    return ServedFiles(info, files)
