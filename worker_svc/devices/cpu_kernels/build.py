"""Compiles the kernels, once a version of them: ``python -m worker_svc.devices.cpu_kernels.build [FOLDER]``.

A worker does so by itself when it first starts, which takes seconds. For a machine without a compiler, an image's for example, the
command leaves them beside their source, or in the folder that it is given.
"""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

_SOURCES: Final = Path(__file__).parent
_FLAGS: Final = (
    "-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-w",
    "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mfma",
)  # fmt: skip
# Of the processor, as the system names them.
_NEEDED: Final = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16")
# Processors with these have units for products that the wheel's own kernels use, and ours do not.
_BETTER_SERVED: Final = "amx_bf16"


class NoKernels(Exception):  # noqa: N818 - says what it is
    """The kernels cannot be had here; the text says why and what to do, in one line."""


def library() -> Path:
    """The compiled kernels, made if they are missing.

    Raises:
        NoKernels: if this processor is not for them, or they cannot be compiled.
    """
    flags = _processor_flags()
    if missing := [name for name in _NEEDED if name not in flags]:
        raise NoKernels(f"the processor has no {missing[0]}")
    if _BETTER_SERVED in flags:
        raise NoKernels(f"the processor has {_BETTER_SERVED}")
    name = file_name()
    for folder in (_SOURCES, _cache()):
        if (folder / name).exists():
            return folder / name
    return compile_into(_cache())


def file_name() -> str:
    """Of the library: changes with the sources and how they are compiled."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for path in sorted([*_SOURCES.glob("*.h"), *_SOURCES.glob("*.cpp")]):
        digest.update(path.read_bytes())
    return f"kernels-{digest.hexdigest()[:16]}.so"


def compile_into(folder: Path) -> Path:
    """Compiles the kernels; complete or absent, however many processes do it at once.

    Raises:
        NoKernels: if there is no compiler, or it fails.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise NoKernels("there is no C++ compiler; install g++ (or set CXX)")
    target = folder / file_name()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            unlinked, linked = Path(work) / "program.o", Path(work) / target.name
            # Two steps, so that nothing is linked for OpenMP: its symbols are those of the runtime that PyTorch has loaded, and its
            # threads the same. A second runtime's would take turns with them on the same processors.
            for command in (
                [compiler, *_FLAGS, "-c", str(_SOURCES / "program.cpp"), "-o", str(unlinked)],
                [compiler, "-shared", str(unlinked), "-o", str(linked)],
            ):
                subprocess.run(command, check=True, capture_output=True, text=True)
            linked.replace(target)
    except subprocess.CalledProcessError as error:
        reason = next((line for line in error.stderr.splitlines() if "error" in line), "no reason given")
        raise NoKernels(f"{compiler} does not compile them ({reason.strip()})") from error
    except OSError as error:
        raise NoKernels(f"they cannot be compiled into {folder} ({error.strerror or error})") from error
    return target


@functools.cache
def _processor_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split() for line in lines if line.startswith("flags")), ()))


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "triptych" / "kernels"


def main() -> int:
    """Compiles into the folder given, or beside the sources; needs no processor that could run the result.

    Returns:
        0, or 2 with the reason in one line.
    """
    try:
        print(compile_into(Path(sys.argv[1]) if len(sys.argv) > 1 else _SOURCES))
    except NoKernels as error:
        print(f"no kernels: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
