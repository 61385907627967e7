"""One real stack for all end-to-end tests: `triptych up` on SmolLM2 in float32, so that tokens can be compared with transformers'."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from worker_svc.model_files.demo_models import fetch

START_TIMEOUT_S = 100.0


@dataclass(frozen=True)
class Stack:
    """A running stack.

    Attributes:
        base_url: of the gateway, without /v1.
        scheduler_address: host:port for direct gRPC clients.
        run_dir: pid files and logs.
        model: name that requests use.
        example: the command that it printed to try.
    """

    base_url: str
    scheduler_address: str
    run_dir: Path
    model: str
    example: str

    def pid(self, service: str) -> int:
        """Process id of "gateway", "scheduler" or "worker-0"."""
        return int((self.run_dir / f"{service}.pid").read_text())


def listening_port(log: Path) -> int:
    """The port in a service's own log line, which it writes after it has bound it."""
    for line in log.read_text().splitlines():
        if line.startswith("{") and (entry := json.loads(line)).get("event") == "listening":
            return int(entry["port"])
    raise AssertionError(f"{log} does not say where the service listens")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The demo model's folder."""
    return fetch("smollm2", None)


@contextlib.contextmanager
def running_stack(folder: Path, name: str, run_dir: Path, *flags: str, **environment: str) -> Iterator[Stack]:
    """`triptych up` on a model's folder, on free ports, until the block ends; then Ctrl-C."""
    command = [
        sys.executable, "-m", "deploy.cli", "up", "--model", str(folder), "--served-model-name", name,
        "--port", "0", "--scheduler-port", "0", "--run-dir", str(run_dir), *flags,
    ]  # fmt: skip
    launcher = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )
    assert launcher.stdout is not None
    # A stack that never gets ready must not hang the tests: reading its output has no timeout of its own.
    watchdog = threading.Timer(START_TIMEOUT_S, launcher.send_signal, (signal.SIGINT,))
    watchdog.start()
    try:
        printed = []
        for line in launcher.stdout:
            printed.append(line)
            if "curl " in line:
                break
        else:
            pytest.fail(f"the stack did not start:\n{''.join(printed)}")
        watchdog.cancel()
        base_url = f"http://127.0.0.1:{listening_port(run_dir / 'gateway.log')}"
        assert httpx.get(f"{base_url}/health", timeout=10).status_code == 200
        yield Stack(
            base_url, f"127.0.0.1:{listening_port(run_dir / 'scheduler.log')}", run_dir, name, printed[-1]
        )
    finally:
        watchdog.cancel()
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=30)
    assert launcher.returncode == 0, "Ctrl-C ends the stack cleanly"


@pytest.fixture(scope="session")
def stack(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Started once; every test may use it, none may stop it."""
    flags = ("--dtype", "float32", "--max-model-len", "2048")
    with running_stack(smollm2, "smollm2", tmp_path_factory.mktemp("stack"), *flags) as stack:
        yield stack
