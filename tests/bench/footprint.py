"""Measures the start time of the torch-free services, and their memory while the stack serves SmolLM2.

``python -m tests.bench.footprint [--quick]`` starts each service several times and takes the median. Then it
starts a whole stack, sends requests and reads the resident memory of gateway and scheduler.
"""

import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import httpx
import psutil

from tests.bench.support.contenders import launched
from tests.bench.support.report import parser, report

READY_LIMIT_S: Final = 3.0
LIMITS_MIB: Final = {"scheduler": 80.0, "gateway": 150.0}


def time_to_ready(package: str) -> float:
    """Starts a service, stops it, and returns the seconds until it logged that it listens.

    Raises:
        RuntimeError: The service exits before it listens.
    """
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", package, "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith("{") and json.loads(line)["event"] == "listening":
                return time.monotonic() - started
        raise RuntimeError(f"{package} exited before it was ready")
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)


def resident_mib(requests: int) -> dict[str, float]:
    """Returns the resident memory of gateway and scheduler in MiB, after that many chat requests."""
    with (
        tempfile.TemporaryDirectory() as folder,
        launched("--run-dir", folder) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        for index in range(requests):
            messages = [{"role": "user", "content": f"Count to {index}."}]
            body = {"model": "smollm2", "max_tokens": 16, "messages": messages}
            client.post("/v1/chat/completions", json=body).raise_for_status()
        pids = {name: int((Path(folder) / f"{name}.pid").read_text()) for name in LIMITS_MIB}
        return {name: psutil.Process(pid).memory_info().rss / 2**20 for name, pid in pids.items()}


def main() -> None:
    """Runs the bench and prints its line."""
    options = parser(__doc__, "fewer repetitions")
    quick = options.parse_args().quick
    ready = {
        name: statistics.median(time_to_ready(package) for _ in range(3 if quick else 9))
        for name, package in (("scheduler", "scheduler_svc"), ("gateway", "gateway"))
    }
    memory = resident_mib(5 if quick else 50)
    figures = {
        "ready_s": {name: round(value, 2) for name, value in ready.items()},
        "resident_mib": {name: round(value, 1) for name, value in memory.items()},
    }
    ratios = {f"ready_{name}": value / READY_LIMIT_S for name, value in ready.items()}
    ratios |= {f"resident_{name}": value / LIMITS_MIB[name] for name, value in memory.items()}
    report("footprint", figures, ratios)


if __name__ == "__main__":
    main()
