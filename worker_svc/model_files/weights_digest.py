"""Digests a model's weights, so that workers with different weights of one name are told apart."""

import hashlib
import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from protos.errors import ConfigurationRefused
from protos.logs import get_logger

_DIGEST = re.compile(r"[0-9a-f]{64}")
_PIECE_BYTES = 1 << 20


def start_digest(weight_files: Sequence[Path], cache: Path) -> Future[str]:
    """Digests names and contents of weight files on a thread of its own, beside imports and loading.

    A file's digest comes, in this order, from the name of a Hugging Face blob, from the cache, or from all of
    its bytes.

    Args:
        weight_files: the files that are loaded.
        cache: folder that keeps the files' digests. It need not exist; if it cannot be written, each start
            reads the files.

    Returns:
        64 hexadecimal digits, equal for equal weights. The result raises `ConfigurationRefused` if a file
        cannot be read.
    """
    found: Future[str] = Future()

    def work() -> None:
        try:
            found.set_result(_digest(weight_files, cache))
        except OSError as error:
            found.set_exception(ConfigurationRefused(f"cannot read the weights: {error}"))

    # A process that stops does not wait for a daemon thread, which may have gigabytes left to read.
    threading.Thread(target=work, name="weights-digest", daemon=True).start()
    return found


def dummy_digest(seed: int, device: str) -> str:
    """Returns the digest of made-up weights, which depend on the seed and on the device's generator."""
    return hashlib.sha256(f"made up, seed {seed}, {device}".encode()).hexdigest()


def _digest(weight_files: Sequence[Path], cache: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(weight_files):
        digest.update(f"{_file_digest(path, cache)} {path.name}\n".encode())
    return digest.hexdigest()


def _file_digest(path: Path, cache: Path) -> str:
    content = path.resolve()
    # The hub's cache names large files by their SHA-256.
    if content.parent.name == "blobs" and _DIGEST.fullmatch(content.name):
        return content.name
    stat = content.stat()
    # Every write changes the time of change, which no program can set.
    key = f"{content}\0{stat.st_dev}\0{stat.st_ino}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}"
    entry = cache / hashlib.sha256(key.encode()).hexdigest()
    try:
        known = entry.read_text()
    except (OSError, ValueError):
        known = ""
    return known if _DIGEST.fullmatch(known) else _read_and_keep(content, entry)


def _read_and_keep(content: Path, entry: Path) -> str:
    digest = hashlib.sha256()
    with content.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    found = digest.hexdigest()
    unfinished = entry.with_suffix(f".{os.getpid()}")
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(found)
        unfinished.replace(entry)
    except OSError as error:
        get_logger().warning("weights_digest_not_kept", file=str(entry), reason=error.strerror)
    return found
