"""Counts the files that one chat request touches: ``python -m tests.support.docs.request_walk``.

Starts the three services on SmolLM2 and sends one chat request to warm up. Then it records each first-party
file with a function that runs while a second, streamed request is in flight. Generated stubs do not count.
``--write`` puts the result into docs/architecture.md.
"""

import argparse
import datetime as dt
import os
import signal
import sys
import tempfile
import textwrap
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from tests.support.docs.pages import table, with_region
from tests.support.docs.rooms import PAGE
from tests.support.paths import ROOT
from tests.support.stack import Stack, running_stack
from worker_svc.model_files.loader import fetch

HOOK = ROOT / "tests" / "support" / "docs" / "walk_hook"
PROCESSES = ("gateway", "scheduler", "worker-0")
SERVICES = ("protos", "gateway", "scheduler_svc", "worker_svc")
# How long a process may take to write its files, seconds.
PATIENCE_S = 30.0


def walk() -> dict[str, list[str]]:
    """Returns the files that run in each process."""
    with tempfile.TemporaryDirectory() as folder:
        seen = Path(folder) / "seen"
        seen.mkdir()
        environment = {
            "PYTHONPATH": os.pathsep.join((str(HOOK), str(ROOT))),
            "TRIPTYCH_WALK": str(seen),
            # Only the request should run meanwhile.
            "TRIPTYCH_MODEL_POLL_S": "600",
        }
        model = fetch("smollm2", None)
        with running_stack(
            model, "smollm2", Path(folder) / "run", "--max-model-len", "2048", **environment
        ) as stack:
            _ask(stack, stream=False)
            time.sleep(1)
            pids = {process: stack.pid(process) for process in PROCESSES}
            for pid in pids.values():
                os.kill(pid, signal.SIGUSR1)
            time.sleep(0.2)
            _ask(stack, stream=True)
            for pid in pids.values():
                os.kill(pid, signal.SIGUSR2)
            return {process: _files(seen / str(pid)) for process, pid in pids.items()}


def _ask(stack: Stack, *, stream: bool) -> None:
    body: dict[str, Any] = {
        "model": stack.model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 8,
        "stream": stream,
    }
    answer = httpx.post(f"{stack.base_url}/v1/chat/completions", json=body, timeout=60)
    answer.raise_for_status()


def _files(written: Path) -> list[str]:
    ends = time.monotonic() + PATIENCE_S
    while not written.exists():
        if time.monotonic() > ends:
            raise TimeoutError(f"{written.name} wrote nothing")
        time.sleep(0.05)
    return [
        file
        for file in written.read_text().splitlines()
        if "_pb2" not in file and Path(file).parts[0] in SERVICES
    ]


def report(seen: dict[str, list[str]], day: dt.date) -> str:
    """Returns the region of the page."""
    files = sorted({file for each in seen.values() for file in each})
    folders = Counter(
        str(Path(*Path(file).parts[:2])) if len(Path(file).parts) > 2 else str(Path(file).parent)
        for file in files
    )
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in files)
    text = textwrap.fill(
        f"While a streamed chat request is in flight, functions of **{len(files)} files** run, which have"
        f" {lines:,} lines together (`python -m tests.support.docs.request_walk`, {day.isoformat()}; generated stubs not"
        " counted). Helpers that a room calls on the way count, and so do background tasks that run meanwhile. By room:",
        120,
    )
    rows = [(f"`{folder}`", str(number)) for folder, number in sorted(folders.items())]
    return "\n".join([text, "", *table(("room", "files"), rows)])


def main() -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.docs.request_walk", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the result into docs/architecture.md")
    write = parser.parse_args().write
    seen = walk()
    for process, files in seen.items():
        print(f"{process}: {len(files)} files", *files, sep="\n  ")
    text = report(seen, dt.datetime.now(tz=dt.UTC).date())
    print(text)
    if write:
        PAGE.write_text(with_region(PAGE.read_text(), "walk", text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
