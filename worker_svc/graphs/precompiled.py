"""Finds a configuration's compiled code before the weights are loaded, or reports why there is none."""

import atexit
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from protos.errors import ConfigurationRefused
from protos.logs import get_logger
from worker_svc.graphs.compile_cache import (
    CompileCache,
    DamagedEntry,
    PendingEntry,
    differences,
    key_of,
    set_compiler_cache_dirs,
)

_REMEDY = "run triptych compile with the same settings, or omit --require-precompiled"


class CompiledCode:
    """The compiled code of one configuration, found in the cache or about to be compiled."""

    is_warm: bool
    """Whether the cache has the code."""
    folder: Path
    """Where the compilers' files are."""

    def __init__(self, cache: CompileCache | None, fields: Mapping[str, str], *, required: bool) -> None:
        """Looks for the code.

        Args:
            cache: `None` to compile anew and keep nothing.
            fields: what the code depends on.
            required: whether to refuse to compile.

        Raises:
            ConfigurationRefused: if the code is required and missing; names every field that differs from the
                nearest entry.
        """
        self._log = get_logger()
        self._fields = dict(fields)
        self._pending: PendingEntry | None = None
        self.is_warm = False
        if cache is None:
            if required:
                raise ConfigurationRefused(
                    "--require-precompiled needs the compile cache, but --no-compile-cache"
                    " or VLLM_DISABLE_COMPILE_CACHE turns it off; omit one of them"
                )
            self.folder = Path(tempfile.mkdtemp(prefix="triptych-code-"))
            atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
            return
        cache.remove_abandoned()
        key = key_of(fields)
        reasons: Sequence[str] = ()
        try:
            self.is_warm = cache.verify(key) is not None
        except DamagedEntry as error:
            reasons = [f"{error}; the entry is damaged"]
            if not required:
                cache.remove(key)
        if self.is_warm:
            self.folder = cache.root / key
            self._log.info("compiled_code_found", entry=key)
            return
        if not reasons:
            nearest = cache.nearest(fields)
            reasons = differences(fields, nearest.fields) if nearest else ["nothing is precompiled"]
        if required:
            raise ConfigurationRefused(f"not precompiled in {cache.root}: {'; '.join(reasons)}; {_REMEDY}")
        for reason in reasons:
            self._log.warning(f"[PRECOMPILED_WARN] {reason}")
        self._pending = cache.begin(fields)
        self.folder = self._pending.folder
        atexit.register(self.discard)

    def activate(self) -> None:
        """Makes compilers read and write the folder from now on."""
        set_compiler_cache_dirs(self.folder)

    def discard(self) -> None:
        """Drops an entry that is not complete."""
        if self._pending is not None:
            self._pending.discard()
            self._pending = None

    def commit(self, graphs: Sequence[str], seconds: float) -> None:
        """Completes the entry if the code was compiled anew.

        Args:
            graphs: the signatures of its graphs, in words.
            seconds: how long compiling took.
        """
        if self._pending is not None:
            self._pending.commit(graphs, seconds)
            self.folder, self._pending = self._pending.folder, None
            self.activate()
            self._log.info("compiled_code_stored", entry=key_of(self._fields))
