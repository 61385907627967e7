"""The vendor's packages for NPUs, where public: `python -m tests.support.rbln.vendor_packages`.

torch-rbln and vllm-rbln are the vendor's own wheels. They have their own folder, because every process that
imports torch loads an installed torch-rbln. The compiler and the runtime are not public: `rebel` is a fake
(`fakes/`), and the runtime's library is built here from `stub/`. Symbols that the wheel needs and the stub
does not define are generated, so the stub follows new versions of the wheel.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.support.paths import ROOT
from tests.support.rbln import wheels

FAKES = ROOT / "tests" / "support" / "rbln" / "fakes"
STUB = ROOT / "tests" / "support" / "rbln" / "stub"
_CACHE = ROOT / ".cache" / "rbln"
TORCH_RBLN = "0.12.0"
VLLM_RBLN = "0.12.0"
_NEEDED = re.compile(r" U (_ZNK?4rbln\w+|_Z\d+rbln_\w+|rbln_\w+)$", re.MULTILINE)
_DEFINED = re.compile(r" [TW] (\w+)$", re.MULTILINE)


def installed() -> Path:
    """Returns the folder with the vendor's packages (`site`) and the stub's library (`lib`).

    The first call fetches the wheels and runs the C++ compiler.

    Raises:
        IndexUnreachable: if a wheel is not in the cache and the package index does not answer.
    """
    sources = sorted(STUB.glob("*.cpp"))
    made_from = (Path(__file__), *sources)
    key = hashlib.sha256(
        b"".join([TORCH_RBLN.encode(), VLLM_RBLN.encode(), *(each.read_bytes() for each in made_from)])
    ).hexdigest()[:16]
    folder = _CACHE / f"{sys.implementation.cache_tag}-{key}"
    if folder.exists():
        return folder
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial = folder.with_suffix(".partial")
            _unpack(partial / "site")
            _build(partial, sources)
            partial.rename(folder)
    return folder


def _unpack(site: Path) -> None:
    for wheel in (wheels.fetch("torch-rbln", TORCH_RBLN), wheels.fetch("vllm-rbln", VLLM_RBLN)):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)


def _build(folder: Path, sources: list[Path]) -> None:
    """Compiles the stub and a function for each symbol that it lacks."""
    library = folder / "lib" / "librbln.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-return-type-c-linkage"]
    command += ["-Wl,-soname,librbln.so", "-o", str(library), *map(str, sources)]
    subprocess.run(command, check=True)
    extensions = sorted((folder / "site" / "torch_rbln").rglob("*.so"))
    needed = {name for each in extensions for name in _NEEDED.findall(_symbols(each))}
    rest = sorted(needed - {*_DEFINED.findall(_symbols(library))})
    generated = folder / "rest.cpp"
    lines = (
        f'extern "C" long stub_{n}() asm("{name}"); long stub_{n}() {{ return 0; }}\n'
        for n, name in enumerate(rest)
    )
    generated.write_text("".join(lines))
    subprocess.run([*command, str(generated)], check=True)


def _symbols(library: Path) -> str:
    return subprocess.run(["nm", "-D", str(library)], check=True, capture_output=True, text=True).stdout


def environment(**changed: str) -> dict[str, str]:
    """Returns this process's environment with the vendor's packages on Python's path, and one thread.

    Such processes are separate from the tests', because torch takes one device of this kind, permanently.
    """
    folder = installed()
    libraries = filter(None, (str(folder / "lib"), os.environ.get("LD_LIBRARY_PATH")))
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{FAKES}:{folder / 'site'}",
        "LD_LIBRARY_PATH": ":".join(libraries),
        "OMP_NUM_THREADS": "1",
        **changed,
    }


def printed_json(stdout: str) -> Any:
    """Returns the last line of JSON. The vendor's library writes its messages to stdout, too."""
    line = [each for each in stdout.splitlines() if each.startswith(("[{", "{"))][-1]
    return json.loads(line)


def compile_blindly(model: Path, folder: Path, *flags: str, **variables: str) -> tuple[int, str]:
    """Runs `triptych compile` without an NPU.

    Returns:
        The number of compiled pieces, and the command's output.
    """
    blind = {"STUB_RBLN_NPU": "", "RBLN_TARGET_SOC": "RBLN-CA25", "VLLM_RBLN_COMPILE_ONLY": "1"}
    done = subprocess.run(
        [
            sys.executable, "-m", "deploy.cli", "compile", "--model", str(model), "--device", "rbln",
            "--compile-cache-dir", str(folder), *flags,
        ],
        env=environment(**blind, **variables), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    found = re.search(r"^(\d+) pieces compiled", done.stdout, re.MULTILINE)
    assert found, output
    return int(found[1]), output


@contextlib.contextmanager
def running_worker(
    folder: Path,
    port: int,
    *flags: str,
    variables: Mapping[str, str] | None = None,
    log: IO[str] | None = None,
) -> Iterator[None]:
    """Runs a worker on device rbln until the block ends."""
    command = [
        sys.executable, "-m", "worker_svc", "--model", str(folder), "--device", "rbln", "--port", "0",
        "--scheduler-address", f"127.0.0.1:{port}", *flags,
    ]  # fmt: skip
    process = subprocess.Popen(command, env=environment(**(variables or {})), stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        assert process.wait(30) == 0


@contextlib.contextmanager
def running_ranks(
    module: str, ranks: Iterable[tuple[Sequence[str], Mapping[str, str]]]
) -> Iterator[list[subprocess.Popen[str]]]:
    """Runs a module for each rank's arguments and variables; kills those that outlast the block."""
    with contextlib.ExitStack() as stack:
        processes = []
        for arguments, variables in ranks:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments], cwd=ROOT, env=environment(**variables), text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        yield processes


def outputs_of(processes: Iterable[subprocess.Popen[str]], limit_s: float = 200) -> list[tuple[str, str]]:
    """Waits for processes, all within one limit; returns stdout and stderr of each.

    Raises:
        subprocess.TimeoutExpired: if one still runs.
    """
    end = time.monotonic() + limit_s
    return [process.communicate(timeout=max(1.0, end - time.monotonic())) for process in processes]


if __name__ == "__main__":
    print(installed())
