"""Remembers graphs that equalled the model, so that later processes skip the comparison.

The comparison of a graph with the model's forward costs two steps per graph at every start. Its result
depends only on code and shapes; a hash of both names the file.
"""

import contextlib
import functools
import hashlib
import json
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

from worker_svc.graphs.compile_cache import key_of

_SOURCES = Path(__file__).parents[1]


class VerificationCache:
    """The compared graphs of a model and shapes."""

    def __init__(self, cache: Path | None, fields: Mapping[str, str]) -> None:
        """Reads nothing yet.

        Args:
            cache: the folder of the device's compiled code; with `None` nothing is remembered.
            fields: dependencies of the graphs outside this package; see `fingerprint.code_fields`.
        """
        self._file: Path | None = None
        if cache is not None:
            key = key_of({**fields, "worker": _digest_of_sources()})
            self._file = cache / "checked" / f"{key}.json"

    def read(self) -> frozenset[str]:
        """Returns the graphs' signatures, in words; none if the file is missing or damaged."""
        if self._file is None:
            return frozenset()
        try:
            signatures = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return frozenset()
        return frozenset(map(str, signatures)) if isinstance(signatures, list) else frozenset()

    def write(self, signatures: Iterable[str]) -> None:
        """Remembers these graphs. Does nothing if the folder cannot be written."""
        if self._file is None:
            return
        unfinished = self._file.with_suffix(f".{uuid.uuid4().hex}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(sorted(signatures)), encoding="utf-8")
            unfinished.replace(self._file)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()


@functools.cache
def _digest_of_sources() -> str:
    """Hashes this package's code: another version of it may record other graphs."""
    digest = hashlib.sha256()
    for path in sorted(_SOURCES.rglob("*.py")):
        digest.update(str(path.relative_to(_SOURCES)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
