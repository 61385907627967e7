"""How a worker's process ends if it cannot serve."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import tiny_models
from tests.support.paths import ROOT

pytestmark = [pytest.mark.contract, pytest.mark.timeout(120)]


def end_of(*flags: str, **variables: str) -> tuple[str, float]:
    """Runs a worker to its end; returns its line about that, and the seconds from the line to the end."""
    command = [sys.executable, "-m", "deploy.cli", "worker", "--device=cpu", "--port=0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | variables) as process:
        assert process.stderr is not None
        lines = []
        said_at = 0.0
        for line in process.stderr:
            if line.startswith("triptych worker: "):
                lines.append(line)
                said_at = time.monotonic()
    assert process.returncode == 2
    (line,) = lines
    return line, time.monotonic() - said_at


def test_the_reason_waits_for_no_scheduler(tmp_path: Path) -> None:
    """The scheduler accepts connections, and is silent otherwise."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        line, took_s = end_of(f"--model={tmp_path}/missing", f"--scheduler-address={address}")
    assert "there is no folder" in line
    assert took_s < 1


def test_a_broken_package_is_one_line(tmp_path: Path) -> None:
    """Here vLLM, whose library is missing."""
    model = tiny_models.write("llama", tmp_path / "model")
    package = tmp_path / "packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('libcudart.so.12: cannot open')")
    path = os.pathsep.join([str(package.parent), str(ROOT)])
    line, _ = end_of(f"--model={model}", "--scheduler-address=", PYTHONPATH=path)
    assert "libcudart.so.12" in line
    assert "triptych install worker" in line
