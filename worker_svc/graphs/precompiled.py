"""Finds the compiled code of a configuration before weights are loaded, and sets the folders of compilers."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from protos.errors import ConfigurationRefused
from protos.service.logs import get_logger
from worker_svc.graphs.compile_cache import (
    TEMPORARY,
    CompileCache,
    DamagedEntry,
    Manifest,
    added_files,
    differences,
    key_of,
)

# By variable that names a compiler's cache, the folder within a folder of ours.
_VARIABLES: Final = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def set_compiler_cache_dirs(folder: Path) -> dict[str, str | None]:
    """Makes compilers keep their files in `folder`; returns the argument of `restore_variables`."""
    before = {name: os.environ.get(name) for name in _VARIABLES}
    os.environ.update({name: str(folder / part) for name, part in _VARIABLES.items()})
    return before


def restore_variables(before: Mapping[str, str | None]) -> None:
    """Makes compilers keep their files where they did before `set_compiler_cache_dirs`."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def replace_unwritable_cache_dirs() -> None:
    """Gives each compiler with an unwritable folder a private folder, until this process ends.

    Otherwise a kernel compiled while serving would fail its step.
    """
    unwritable = {name: path for name, path in _compiler_cache_dirs().items() if not _is_writable(path)}
    if not unwritable:
        return
    log = get_logger()
    folders = ", ".join(map(str, unwritable.values()))
    try:
        private = Path(tempfile.mkdtemp(prefix=TEMPORARY))
    except OSError as error:
        log.warning("compiler_folders_not_writable", folders=folders, reason=str(error))
        return
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    for name in unwritable:
        os.environ[name] = str(private / _VARIABLES[name])
    log.warning("compiler_folders_replaced", folders=folders, by=str(private))


def _compiler_cache_dirs() -> dict[str, Path]:
    """Returns the compilers' folders by variable.

    PyTorch's own choice is left out: it lies among temporary files already.
    """
    triton_home = Path(os.path.expanduser(os.environ.get("TRITON_HOME") or "~"))  # noqa: PTH111 - never raises
    folders = {"TRITON_CACHE_DIR": triton_home / ".triton" / "cache"}
    return folders | {name: Path(value) for name in _VARIABLES if (value := os.environ.get(name))}


def _is_writable(folder: Path) -> bool:
    # `Path.exists` raises where a folder may not be searched.
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))  # noqa: PTH110
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


_REMEDY = "run triptych compile with the same settings, or omit --require-precompiled"


class CompiledCode:
    """The compiled code of a configuration, found in the cache or about to be compiled."""

    is_warm: bool
    """Whether the cache has the code."""
    folder: Path
    """Where the compilers' files are: a private folder until the code is complete, then its entry."""

    def __init__(self, cache: CompileCache | None, fields: Mapping[str, str], *, required: bool) -> None:
        """Looks for the code. An unusable cache costs only its savings.

        Args:
            cache: `None` to compile afresh and keep nothing.
            fields: dependencies of the code.
            required: whether to refuse to compile.

        Raises:
            ConfigurationRefused: if the code is required and missing; names every field different from the
                nearest entry.
        """
        self._log = get_logger()
        self._fields = dict(fields)
        self._key = key_of(fields)
        self._cache = cache
        self._manifest: Manifest | None = None
        self._is_new = False
        # A folder to remove: of an unfinished entry, of the compilers' copy, or outside the cache.
        self._private: Path | None = None
        self._variables: Mapping[str, str | None] = {}
        self.is_warm = False
        folder = None if cache is None else self._open(cache, required=required)
        if folder is None:
            folder = self._private = Path(tempfile.mkdtemp(prefix=TEMPORARY))
        self.folder = folder
        atexit.register(self.discard)

    def _open(self, cache: CompileCache, *, required: bool) -> Path | None:
        cache.remove_abandoned()
        manifest, reasons = self._find(cache, required=required)
        if manifest is not None:
            self.is_warm, self._manifest = True, manifest
            self._log.info("compiled_code_found", entry=self._key)
            return self._copy(cache, manifest)
        if required:
            raise ConfigurationRefused(f"not precompiled in {cache.root}: {'; '.join(reasons)}; {_REMEDY}")
        for reason in reasons:
            self._log.warning(f"[PRECOMPILED_WARN] {reason}")
        try:
            self._private = cache.begin(self._fields)
        except ConfigurationRefused as error:
            self._log.warning("compiled_code_not_kept", reason=error.message)
        else:
            self._is_new = True
        return self._private

    def _find(self, cache: CompileCache, *, required: bool) -> tuple[Manifest | None, Sequence[str]]:
        try:
            if (manifest := cache.verify(self._key)) is not None:
                return manifest, ()
            nearest = cache.nearest(self._fields)
        except DamagedEntry as error:
            if not required:
                cache.remove(self._key)
            return None, [f"{error}; the entry is damaged"]
        except OSError as error:
            return None, [f"{cache.root} cannot be read ({error.strerror})"]
        return None, differences(self._fields, nearest.fields) if nearest else ["nothing is precompiled"]

    def _copy(self, cache: CompileCache, manifest: Manifest) -> Path:
        """Returns the folder of the compilers' copy, or the entry's without room for a copy."""
        try:
            self._private = cache.copy(manifest)
        except OSError as error:
            self._log.warning("compiled_code_not_copied", entry=self._key, reason=str(error))
            return cache.root / self._key
        return self._private

    @property
    def was_found(self) -> bool:
        """Whether the cache had the code before this process."""
        return self._manifest is not None

    @property
    def num_added(self) -> int | None:
        """Files added by compilers to cached code; `None` without cached code."""
        return None if self._manifest is None else len(added_files(self.folder, self._manifest))

    def activate(self) -> None:
        """Makes compilers read and write the folder from now on."""
        self._variables = set_compiler_cache_dirs(self.folder)

    def discard(self) -> None:
        """Drops an entry that is not complete, and a private folder. Compilers keep later code elsewhere."""
        restore_variables(self._variables)
        self._variables = {}
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)
            self._private, self._is_new = None, False

    def commit(self, graphs: Sequence[str], seconds: float) -> None:
        """Completes the entry if the code was compiled anew.

        Compilers keep later code where they would without us, so that an entry never changes.

        Args:
            graphs: the signatures of its graphs, in words.
            seconds: how long compiling took.
        """
        if self._cache is None:
            return
        if self._is_new:
            try:
                self._cache.commit(self.folder, self._fields, graphs, seconds)
            except OSError as error:
                self._log.warning("compiled_code_not_kept", reason=str(error))
            else:
                self.is_warm = True
                self._log.info("compiled_code_stored", entry=self._key)
        self.discard()
        if self.is_warm:
            self.folder = self._cache.root / self._key
