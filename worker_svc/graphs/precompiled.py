"""Finds a configuration's compiled code before the weights are loaded, or says what is in the way."""

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
    Filling,
    differences,
    key_of,
    point_compilers_at,
)

_WAY_OUT = "run triptych compile with the same settings, or drop --require-precompiled"


class CompiledCode:
    """The code of one configuration, from the cache or about to be made.

    Attributes:
        is_warm: whether an entry was found.
        folder: where the compilers' files are.
    """

    def __init__(self, cache: CompileCache | None, fields: Mapping[str, str], *, required: bool) -> None:
        """Looks it up.

        Args:
            cache: ``None`` for compiling afresh and keeping nothing.
            fields: what the code depends on.
            required: whether to refuse to compile.

        Raises:
            ConfigurationRefused: if it is required and not there, with every field that differs from the nearest entry.
        """
        self._log = get_logger()
        self._fields = dict(fields)
        self._filling: Filling | None = None
        self.is_warm = False
        if cache is None:
            if required:
                raise ConfigurationRefused(
                    "precompiled code is required, and the compile cache is off (VLLM_DISABLE_COMPILE_CACHE); use one of the two"
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
            self._log.info("precompiled", entry=key)
            return
        if not reasons:
            nearest = cache.nearest(fields)
            reasons = differences(fields, nearest.fields) if nearest else ["nothing is precompiled"]
        if required:
            raise ConfigurationRefused(f"not precompiled in {cache.root}: {'; '.join(reasons)}; {_WAY_OUT}")
        for reason in reasons:
            self._log.warning(f"[PRECOMPILED_WARN] {reason}")
        self._filling = cache.fill(fields)
        self.folder = self._filling.folder
        atexit.register(self.discard)

    def use(self) -> None:
        """From now on compilers find and leave their files there."""
        point_compilers_at(self.folder)

    def discard(self) -> None:
        """Keeps nothing of an entry that was about to be made."""
        if self._filling is not None:
            self._filling.discard()
            self._filling = None

    def keep(self, graphs: Sequence[str], seconds: float) -> None:
        """Completes the entry if it was about to be made.

        Args:
            graphs: the signatures that it holds, in words.
            seconds: what compiling took.
        """
        if self._filling is not None:
            self._filling.commit(graphs, seconds)
            self.folder, self._filling = self._filling.folder, None
            self.use()
            self._log.info("precompiled_kept", entry=key_of(self._fields))
