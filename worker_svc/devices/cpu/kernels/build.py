"""Compiles the kernels: `triptych build-kernels [FOLDER]`.

A worker compiles them at its first start, in seconds. For machines without a compiler, such as images, the
command stores them in FOLDER, or next to their source. The file ends with the SHA-256 of its code and the
sources, so a damaged or other library of the same name is compiled again.
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

from protos.service import private_files

_SOURCES: Final = Path(__file__).parent
_FLAGS: Final = (
    "-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-w",
    "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mfma",
)  # fmt: skip
# Processor features, as the system names them.
_NEEDED: Final = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16")
_AMX: Final = "amx_bf16"
_SEAL_BYTES: Final = 32


class KernelsUnavailable(Exception):  # noqa: N818 - a state, not an error
    """The kernels cannot run here. The text gives reason and remedy."""


def library() -> Path:
    """Returns the compiled kernels; compiles them if they are missing.

    Raises:
        KernelsUnavailable: if this processor cannot run them, or if they do not compile.
        ConfigurationRefused: if others may write to the folder that keeps them.
    """
    flags = _processor_flags()
    if missing := [name for name in _NEEDED if name not in flags]:
        raise KernelsUnavailable(f"the processor has no {missing[0]}")
    name = file_name()
    # Whoever owns the sources decides what we run anyway.
    if _is_ours(_SOURCES / name):
        return _SOURCES / name
    try:
        private_files.make_folder(_cache(), "the cache of kernels", "change XDG_CACHE_HOME")
    except OSError as error:
        raise _unwritable(_cache(), error) from error
    return _cache() / name if _is_ours(_cache() / name) else compile_into(_cache())


def has_matrix_units() -> bool:
    """Whether the processor has AMX: matrix units for bfloat16, which vLLM's kernels use and ours do not."""
    return _AMX in _processor_flags()


def file_name() -> str:
    """Returns the library's file name, which changes with the sources and the compiler's flags."""
    return f"kernels-{_sources_digest()[:16]}.so"


@functools.cache
def _sources_digest() -> str:
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for path in sorted([*_SOURCES.glob("*.h"), *_SOURCES.glob("*.cpp")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _seal(code: bytes) -> bytes:
    """Returns the end of a library file, which loaders ignore: a digest of its code and sources."""
    return hashlib.sha256(code + _sources_digest().encode()).digest()


def _is_ours(path: Path) -> bool:
    """Whether a file is the library of these sources, as the compiler wrote it."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return content[-_SEAL_BYTES:] == _seal(content[:-_SEAL_BYTES])


def compile_into(folder: Path) -> Path:
    """Compiles the kernels. Several processes may do so at once; the file is complete or absent.

    Raises:
        KernelsUnavailable: if there is no compiler or it fails.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise KernelsUnavailable("there is no C++ compiler; install g++ (or set CXX)")
    target = folder / file_name()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            unlinked, linked = Path(work) / "program.o", Path(work) / target.name
            # Linking in a second step leaves out OpenMP's library: the symbols resolve to the runtime that
            # PyTorch has loaded. A second runtime's threads would compete with PyTorch's for the same
            # processors.
            for command in (
                [compiler, *_FLAGS, "-c", str(_SOURCES / "program.cpp"), "-o", str(unlinked)],
                [compiler, "-shared", str(unlinked), "-o", str(linked)],
            ):
                subprocess.run(command, check=True, capture_output=True, text=True)
            with linked.open("ab") as file:
                file.write(_seal(linked.read_bytes()))
            linked.replace(target)
    except subprocess.CalledProcessError as error:
        reason = next((line for line in error.stderr.splitlines() if "error" in line), "no reason given")
        raise KernelsUnavailable(f"{compiler} does not compile the kernels ({reason.strip()})") from error
    except OSError as error:
        raise _unwritable(folder, error) from error
    return target


def _unwritable(folder: Path, error: OSError) -> KernelsUnavailable:
    return KernelsUnavailable(f"the kernels cannot be compiled into {folder} ({error.strerror or error})")


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


def main(argv: list[str]) -> int:
    """Compiles into the given folder, or next to the sources.

    The processor need not be able to run the result.

    Returns:
        0, or 2 with the reason in one line.
    """
    try:
        print(compile_into(Path(argv[0]) if argv else _SOURCES))
    except KernelsUnavailable as error:
        print(f"no kernels: {error}", file=sys.stderr)
        return 2
    return 0
