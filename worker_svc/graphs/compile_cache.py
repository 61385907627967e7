"""Compiled code on disk: one folder a configuration, complete or absent.

An entry is keyed by everything that its code depends on. Its folder is what the compiler uses as its own cache, so that a warm start
finds each kernel there. It is filled under another name and renamed when it is complete, after its manifest with the checksum of every
file was written: whoever is killed on the way leaves nothing that could be taken for an entry, and of two processes that fill the same
entry the first one wins. A folder holds no absolute path that matters, so it may be copied to another machine of the kind.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from protos.errors import ConfigurationRefused

MANIFEST: Final = "manifest.json"
# Left by whoever was killed while filling an entry; nobody compiles for longer.
_ABANDONED_S: Final = 6 * 3600.0
_FILLING: Final = ".filling-"
_KEY: Final = re.compile(r"[0-9a-f]{32}")
# What a compiler keeps beside its results, and what differs from run to run.
_TRANSIENT: Final = (".lock", ".tmp", ".pid")
# Where compilers look for their cache.
_VARIABLES: Final = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


class DamagedEntry(Exception):  # noqa: N818 - says what it is
    """An entry whose files are not those that were written; the text names the first."""


@dataclass(frozen=True)
class Manifest:
    """What an entry says about itself."""

    fields: Mapping[str, str]
    """What the code depends on."""
    graphs: Sequence[str]
    """The signatures that it holds, in words."""
    seconds: float
    """What compiling took."""
    created: float
    """Seconds since the epoch."""
    files: Mapping[str, str]
    """SHA-256 of each file, by its path within the entry."""

    @property
    def key(self) -> str:
        """The entry's name."""
        return key_of(self.fields)


def key_of(fields: Mapping[str, str]) -> str:
    """The name of the entry for these fields."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]


def differences(wanted: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """One line a field that differs."""
    return [
        f"{name}: {wanted.get(name, '(none)')} is wanted, {found.get(name, '(none)')} is precompiled"
        for name in sorted({*wanted, *found})
        if wanted.get(name) != found.get(name)
    ]


class CompileCache:
    """A folder of entries. Several processes may use it at once.

    Attributes:
        root: the folder; it need not exist.
    """

    def __init__(self, root: Path) -> None:
        """Looks at nothing yet."""
        self.root = root

    def entries(self) -> list[str]:
        """The entries' names, damaged ones included."""
        if not self.root.is_dir():
            return []
        return sorted(
            path.name for path in self.root.iterdir() if path.is_dir() and _KEY.fullmatch(path.name)
        )

    def read(self, key: str) -> Manifest | None:
        """An entry's manifest, or ``None`` if there is no such entry.

        Raises:
            DamagedEntry: if it cannot be read.
        """
        path = self.root / key / MANIFEST
        try:
            said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            manifest = Manifest(
                said["fields"], said["graphs"], float(said["seconds"]), float(said["created"]), said["files"]
            )
            if manifest.key != key:
                raise DamagedEntry(f"{path} is that of another entry, {manifest.key}")
        except FileNotFoundError:
            if path.parent.is_dir():
                raise DamagedEntry(f"{path} is missing") from None
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedEntry(f"{path} cannot be read ({type(error).__name__}: {error})") from error
        return manifest

    def verify(self, key: str) -> Manifest | None:
        """The same, once every file was found to be what was written.

        Raises:
            DamagedEntry: naming the first file that is not.
        """
        manifest = self.read(key)
        if manifest is not None:
            for name, digest in manifest.files.items():
                path = self.root / key / name
                try:
                    good = _sha256(path) == digest
                except OSError:
                    good = False
                if not good:
                    raise DamagedEntry(f"{path} is missing or not what was written")
        return manifest

    def nearest(self, fields: Mapping[str, str]) -> Manifest | None:
        """The entry that differs in the fewest fields, damaged ones left out; ``None`` if there are none."""
        found = []
        for key in self.entries():
            with contextlib.suppress(DamagedEntry):
                if (manifest := self.read(key)) is not None:
                    found.append(manifest)
        return min(found, key=lambda each: len(differences(fields, each.fields)), default=None)

    def remove(self, key: str) -> None:
        """Removes an entry: first it ceases to be one, then its files go."""
        gone = self.root / f"{_FILLING}{key}-{uuid.uuid4().hex}"
        with contextlib.suppress(FileNotFoundError):
            (self.root / key).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def remove_abandoned(self, *, older_than: float = _ABANDONED_S) -> int:
        """Removes what killed processes left; returns how many folders.

        Args:
            older_than: seconds since the folder was made. A younger one may be somebody's who is at work.
        """
        count = 0
        for path in self.root.glob(f"{_FILLING}*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime >= older_than:
                    shutil.rmtree(path, ignore_errors=True)
                    count += 1
        return count

    def fill(self, fields: Mapping[str, str]) -> "Filling":
        """A new folder for the entry of these fields.

        Raises:
            ConfigurationRefused: if the cache cannot be written.
        """
        folder = self.root / f"{_FILLING}{key_of(fields)}-{uuid.uuid4().hex}"
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise ConfigurationRefused(
                f"the compile cache {self.root} cannot be written ({error.strerror}); change --compile-cache-dir"
            ) from error
        return Filling(self, folder, fields)


class Filling:
    """An entry while it is made.

    Attributes:
        folder: where compilers are to put their files.
    """

    def __init__(self, cache: CompileCache, folder: Path, fields: Mapping[str, str]) -> None:
        """Use :meth:`CompileCache.fill`."""
        self._cache = cache
        self._fields = dict(fields)
        self.folder = folder

    def commit(self, graphs: Sequence[str], seconds: float) -> None:
        """Makes it an entry, unless another process was faster."""
        files = {
            path.relative_to(self.folder).as_posix(): _sha256(path)
            for path in sorted(self.folder.rglob("*"))
            if path.is_file() and path.suffix not in _TRANSIENT and "locks" not in path.parts
        }
        manifest = {
            "fields": self._fields, "graphs": list(graphs), "seconds": seconds, "created": time.time(), "files": files,
        }  # fmt: skip
        path = self.folder / MANIFEST
        with path.open("w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        key = key_of(self._fields)
        target = self._cache.root / key
        try:
            there = self._cache.verify(key) is not None
        except DamagedEntry:
            there = False
            self._cache.remove(key)
        if there:
            self.discard()
        else:
            try:
                self.folder.rename(target)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                self.discard()  # somebody else's came in this moment
        self.folder = target

    def discard(self) -> None:
        """Removes what was made."""
        shutil.rmtree(self.folder, ignore_errors=True)


def point_compilers_at(folder: Path) -> None:
    """Has compilers keep their files in a folder, from now on."""
    os.environ.update({name: str(folder / part) for name, part in _VARIABLES.items()})


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
