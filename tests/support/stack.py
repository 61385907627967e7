"""Runs a whole stack on this machine: `triptych up` on free ports."""

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

import grpc.aio
import httpx
import pytest

from protos.service.channels import LinkSecurity
from protos.service.tokens import ServiceTokens
from tests.support.paths import ROOT

START_TIMEOUT_S = 100.0


@dataclass(frozen=True)
class Stack:
    """A running stack."""

    base_url: str
    """The gateway's URL, without /v1."""
    scheduler_address: str
    """host:port for direct gRPC clients, which need the token."""
    run_dir: Path
    """The folder of pid files and logs."""
    model: str
    """The name that requests use."""
    example: str
    """The example command that the launcher printed."""

    @property
    def token_file(self) -> Path:
        """The file with the service token, unless a test has set another."""
        return self.run_dir / "secure" / "service-token"

    def open_channel(self) -> grpc.aio.Channel:
        """Opens a channel of a direct gRPC client."""
        security = LinkSecurity(tokens=ServiceTokens(file=self.token_file))
        return security.open_channel(self.scheduler_address)

    def pid(self, service: str) -> int:
        """Returns the process id of "gateway", "scheduler" or "worker-0"."""
        return int((self.run_dir / f"{service}.pid").read_text())


def listening_port(log: Path) -> int:
    """Returns the port in a service's log; the service logs it once it listens."""
    for line in log.read_text().splitlines():
        if line.startswith("{") and (entry := json.loads(line)).get("event") == "listening":
            return int(entry["port"])
    raise AssertionError(f"{log} has no line with the port")


@contextlib.contextmanager
def running_stack(folder: Path, name: str, run_dir: Path, *flags: str, **environment: str) -> Iterator[Stack]:
    """Runs `triptych up` for a model's folder on free ports until the block ends, then sends Ctrl-C."""
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
    # Reading the output has no timeout, so a watchdog ends a stack that never becomes ready.
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
    assert not list(run_dir.glob("*.pid")), "nothing is left running"


def run_example(script: str, stack: Stack, *arguments: str, key: str = "unused") -> list[str]:
    """Runs a script of examples/ for a stack; returns the lines that it printed."""
    environment = {
        "OPENAI_BASE_URL": f"{stack.base_url}/v1",
        "OPENAI_API_KEY": key,
        "TRIPTYCH_SCHEDULER_ADDRESS": stack.scheduler_address,
        "TRIPTYCH_SERVICE_TOKEN_FILE": str(stack.token_file),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, str(ROOT / "examples" / script), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
