"""Compiles the device's C++ part once; the library is kept in the repository's `.cache`."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch.utils import cpp_extension

_SOURCE = Path(__file__).parent / "device.cpp"
_CACHE = Path(__file__).parents[5] / ".cache" / "fake-rbln"


def library() -> Path:
    """Returns the compiled library. Several processes may compile it at once; the file is complete or absent.

    Raises:
        subprocess.CalledProcessError: if it does not compile.
    """
    digest = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    target = _CACHE / f"device-{digest}.so"
    if target.exists():
        return target
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    assert compiler, "there is no C++ compiler"
    _CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
        linked = Path(folder) / target.name
        command = [
            compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(f"-I{path}" for path in cpp_extension.include_paths()), str(_SOURCE), "-o", str(linked),
            *(f"-L{path}" for path in cpp_extension.library_paths()), "-lc10", "-ltorch_cpu", "-ltorch",
        ]  # fmt: skip
        subprocess.run(command, check=True)
        linked.replace(target)
    return target
