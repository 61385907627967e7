"""`triptych keep-worker`, the command of the worker's image, with a real scheduler and a real model."""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.support.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@contextlib.contextmanager
def command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Runs a subcommand; kills it at the end if it still runs. The children of a launcher die with it."""
    with subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], **fields: str) -> dict[str, Any]:
    """Reads a command's output up to a line of JSON with these fields, and returns that line."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if all(entry.get(name) == value for name, value in fields.items()):
                return dict(entry)
    raise AssertionError(f"{fields} did not appear in: {''.join(seen)}")


@pytest.mark.slow
def test_a_dead_worker_is_replaced_by_a_standby_and_sigterm_ends_both() -> None:
    """The worker is back without imports, with the same port; a stop leaves no process behind."""
    scheduler, port = f"127.0.0.1:{free_port()}", free_port()
    shapes = ("--max-num-seqs", "2", "--max-model-len", "1024")
    model = ("--model", "smollm2", "--device", "cpu")
    with (
        command("scheduler", "--port", scheduler.rpartition(":")[2], *shapes),
        command("keep-worker", *model, "--port", str(port), "--scheduler-address", scheduler) as keeper,
    ):
        first = read_until(keeper, event="prepared")
        read_until(keeper, event="standby_ready")
        family = psutil.Process(keeper.pid).children()
        (worker,) = [process for process in family if "worker" in process.cmdline()]
        (standby,) = [process for process in family if process != worker]

        worker.kill()
        assert read_until(keeper, event="listening")["port"] == port
        assert read_until(keeper, event="prepared")["import_s"] < 0.1 * first["import_s"]
        read_until(keeper, event="registered", state="serving")
        assert standby.is_running()

        family = psutil.Process(keeper.pid).children(recursive=True)
        keeper.send_signal(signal.SIGTERM)
        keeper.communicate(timeout=60)
        assert keeper.returncode == 0
        assert standby in family
        assert psutil.wait_procs(family, timeout=10)[1] == []
