"""Processes that find fakes of the vendor's packages for NPUs; see `tests/support/rbln/fakes`.

They are processes of their own because torch can have one such device, for good.
"""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from tests.support.paths import ROOT

PACKAGES = ROOT / "tests" / "support" / "rbln" / "fakes"


def environment(**changed: str) -> dict[str, str]:
    """Returns this process's environment with the fakes on Python's path, and one thread."""
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{PACKAGES}", "OMP_NUM_THREADS": "1", **changed}


def compile_blindly(model: Path, folder: Path, *flags: str, **variables: str) -> tuple[int, str]:
    """Runs `triptych compile` without an NPU.

    Returns:
        The number of compiled pieces, and the command's output.
    """
    blind = {"FAKE_RBLN_NPU": "", "RBLN_TARGET_SOC": "RBLN-CA25", "VLLM_RBLN_COMPILE_ONLY": "1"}
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
