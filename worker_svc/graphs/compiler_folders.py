"""Where PyTorch's and Triton's compilers keep their files: two variables of the environment."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from protos.logs import get_logger

# By variable that names a compiler's cache, the folder within a folder of ours.
_VARIABLES: Final = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}

TEMPORARY: Final = "triptych-code-"
"""The start of the names of temporary folders with compiled code."""


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
    """Whether files can be created in a folder, which need not exist."""
    # `Path.exists` raises where a folder may not be searched.
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))  # noqa: PTH110
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
