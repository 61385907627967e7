"""`triptych up` with real services and a real model."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.timeout(240)]

QUICK = ["--device", "cpu", "--max-num-seqs", "2", "--max-model-len", "1024"]


@contextlib.contextmanager
def launcher(run_dir: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Runs a launcher on free ports, and kills it at the end if it still runs; its children die with it."""
    command = [
        sys.executable, "-m", "deploy.cli", "up", "--port", "0", "--run-dir", str(run_dir), *arguments,
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Reads the launcher's output up to a line with `text`, and returns that line."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return line
    raise AssertionError(
        f"{text!r} did not appear; the launcher printed: {''.join(seen)}{process.communicate()[1]}"
    )


def ask(base: str) -> str:
    """Asks for France's capital. Greedy sampling always gives the same answer."""
    question = [{"role": "user", "content": "Name the capital of France."}]
    body = {"model": "smollm2", "messages": question, "temperature": 0, "max_tokens": 10}
    request = urllib.request.Request(
        f"{base}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def pids(run_dir: Path) -> dict[str, int]:
    """Returns the services' process ids by name."""
    return {path.stem: int(path.read_text()) for path in run_dir.glob("*.pid")}


def running(pid: int) -> bool:
    """Returns whether a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_for_standby(run_dir: Path) -> None:
    """Waits until a standby has imported what a worker needs."""
    log, deadline = run_dir / "standby-0.log", time.monotonic() + 120
    while not (log.exists() and "standby_ready" in log.read_text()):
        assert time.monotonic() < deadline, "no standby is ready"
        time.sleep(0.05)


def open_files(pid: int) -> list[str]:
    """Returns what a process has open: paths, and sockets and pipes by number."""
    return [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]


def wait_until_gone(processes: dict[str, int]) -> None:
    deadline = time.monotonic() + 20
    while left := {name: pid for name, pid in processes.items() if running(pid)}:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.05)


@pytest.mark.slow
def test_serves_survives_a_killed_worker_and_stops_cleanly(tmp_path: Path) -> None:
    """The stack answers, answers again after its worker is killed, and leaves nothing behind after Ctrl-C."""
    with launcher(tmp_path, *QUICK) as process:
        address = next(
            word for word in read_until(process, "Serving smollm2").split() if word.startswith("http")
        )
        assert "curl" in read_until(process, "/chat/completions")
        assert "Paris" in ask(address)
        before = pids(tmp_path)
        assert set(before) - {"standby-0"} == {"launcher", "gateway", "scheduler", "worker-0"}

        wait_for_standby(tmp_path)
        before = pids(tmp_path)
        opened = open_files(before["standby-0"])
        assert not [name for name in opened if name.startswith(("socket:", "/dev/nvidia", "/dev/rbln"))]
        os.kill(before["worker-0"], signal.SIGKILL)
        assert str(tmp_path / "worker-0.log") in read_until(process, "worker-0 died (SIGKILL)")
        read_until(process, "A standby takes the place of worker-0")
        assert "Paris" in ask(address)
        after = pids(tmp_path)
        assert after["worker-0"] == before["standby-0"]
        assert after["gateway"] == before["gateway"]
        log = [json.loads(line) for line in (tmp_path / "worker-0.log").read_text().splitlines()]
        imports_s = [entry["import_s"] for entry in log if entry["event"] == "prepared"]
        assert len(imports_s) == 2
        assert imports_s[1] < 0.1 * imports_s[0]

        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0
        assert errors == ""
    assert [*tmp_path.glob("*.pid"), *tmp_path.rglob("*.sock")] == []
    wait_until_gone(before | after)


@pytest.mark.slow
def test_gateways_share_the_http_port(tmp_path: Path) -> None:
    """Both serve; when one is killed, the other answers, and the launcher starts it again."""
    with launcher(tmp_path, *QUICK, "--gateways", "2") as process:
        address = next(
            word for word in read_until(process, "Serving smollm2").split() if word.startswith("http")
        )
        own = [read_until(process, "Metrics of a gateway").split()[-1] for _ in range(2)]
        before = pids(tmp_path)
        assert set(before) == {"launcher", "gateway-0", "gateway-1", "scheduler", "worker-0"}
        os.kill(before["gateway-1"], signal.SIGKILL)
        read_until(process, "gateway-1 died (SIGKILL)")
        assert "Paris" in ask(address)
        read_until(process, "gateway-1 restarts")
        wait_until_served(own)
        assert pids(tmp_path)["gateway-1"] != before["gateway-1"]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode == 0
    wait_until_gone(before)


def wait_until_served(urls: list[str]) -> None:
    deadline = time.monotonic() + 30
    for url in urls:
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
                assert b"process_cpu_seconds_total" in answer.read()
                break
            assert time.monotonic() < deadline, f"{url} does not answer"
            time.sleep(0.05)


@pytest.mark.slow
def test_nothing_outlives_a_killed_launcher(tmp_path: Path) -> None:
    """The services of a killed launcher die with it."""
    with launcher(tmp_path, *QUICK) as process:
        read_until(process, "logs in")
        deadline = time.monotonic() + 20
        while len(started := pids_written(tmp_path)) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        read_until(process, "worker-0: ")
        process.kill()
    wait_until_gone(started)


def pids_written(run_dir: Path) -> dict[str, int]:
    """Returns what `pids` does, or nothing while a file is half written."""
    with contextlib.suppress(ValueError):
        return pids(run_dir)
    return {}
