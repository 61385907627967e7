"""Checks of the machine and its environment, without a device."""

import importlib.util
import shutil
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from deploy.diagnosis.findings import Missing, Remark

# An entry of the compile cache of a model with billions of parameters may have this size on an NPU.
_USUAL_ENTRY_BYTES = 8 << 30
_GIB = 2**30


def packages(*required: str) -> str:
    """Returns the versions of distributions.

    Args:
        *required: names; alternatives are separated by "|".

    Raises:
        Missing: names those that are not installed.
    """
    found, missing = [], []
    for names in required:
        for name in names.split("|"):
            try:
                found.append(f"{name} {version(name)}")
                break
            except PackageNotFoundError:
                continue
        else:
            missing.append(names.replace("|", " or "))
    if missing:
        raise Missing(f"{' and '.join(missing)} not installed; run `triptych install worker`")
    return ", ".join(found)


def importable(modules: Mapping[str, str], advice: str) -> str:
    """Checks that modules exist, without importing them.

    Args:
        modules: the distribution of each module, by the module's name.
        advice: what to do if one is missing.

    Returns:
        The distributions' versions.

    Raises:
        Missing: names the modules that do not exist.
    """
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise Missing(f"no module {' and '.join(missing)}; {advice}")
    found = []
    for module, distribution in modules.items():
        try:
            found.append(f"{distribution} {version(distribution)}")
        except PackageNotFoundError:
            found.append(f"{module} (without a version)")
    return ", ".join(found)


def cache_folder(folder: Path | None) -> str:
    """Checks that compiled code can be kept.

    Raises:
        Remark: if the cache is off or nearly full.
        Missing: if the folder cannot be written.
    """
    if folder is None:
        raise Remark("the compile cache is off: every start compiles anew")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise Missing(f"{folder} cannot be written ({error.strerror}); change --compile-cache-dir") from error
    free = shutil.disk_usage(folder).free
    text = f"{folder}, {free / _GIB:.3g} GiB free"
    if free < _USUAL_ENTRY_BYTES:
        raise Remark(f"{text}: little for the code of a large model; change --compile-cache-dir")
    return text
