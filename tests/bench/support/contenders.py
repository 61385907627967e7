"""Runs the servers of a comparison: times their start, measures their memory, and stops them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx
import psutil

from tests.support.paths import ROOT
from tests.support.ports import free_port

_START_TIMEOUT_S: Final = 600.0
_STOP_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.1
_PORT: Final = 18_000
# Prefixes of variables that steer one contender alone.
_DROPPED: Final = ("OMP_", "GOMP_", "KMP_", "MKL_", "VLLM_", "TRIPTYCH_", "PYTHONPATH")
# Both keep their bytecode: compiling all that they import takes longer than the rest of a start.
_UNSET: Final = "PYTHONDONTWRITEBYTECODE"


class ContenderFailed(Exception):  # noqa: N818 - says what happened
    """A server or its client failed; the message is one line for people."""


@dataclass(frozen=True)
class Contender:
    """A way to serve a model."""

    name: str
    command: Callable[[int, Path], list[str]]
    """Returns the command for a port and a folder for run-time files."""
    is_ours: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Memory:
    """Memory of a server's processes, MiB; shared pages count once."""

    total: float
    beside_worker: float
    """All but the largest process, which holds weights and KV memory."""


@dataclass(frozen=True)
class Server:
    """A healthy server."""

    port: int
    start_s: float
    """Seconds from starting the first process to the first 200 of /health."""
    process: psutil.Process

    def memory(self) -> Memory:
        """Returns the memory that its processes hold now."""
        sizes = [
            process.memory_full_info().pss / 2**20
            for process in (self.process, *self.process.children(recursive=True))
        ]
        return Memory(sum(sizes), sum(sizes) - max(sizes))


def contenders(
    folder: Path, vllm: Path, flags: Sequence[str], vllm_flags: Sequence[str]
) -> tuple[Contender, Contender, Contender]:
    """Returns the contenders: vLLM with its default thread binding, vLLM on all cores, and Triptych."""

    def theirs(port: int, _: Path) -> list[str]:
        return [
            str(vllm), "serve", str(folder), *flags, *vllm_flags, "--host", "127.0.0.1", "--port", str(port),
        ]  # fmt: skip

    def ours(port: int, run_dir: Path) -> list[str]:
        return [
            sys.executable, "-m", "deploy.cli", "up", "--model", str(folder), *flags, "--device", "cpu", "--port", str(port),
            "--run-dir", str(run_dir / "run"),
        ]  # fmt: skip

    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return (
        Contender("vllm", theirs),
        Contender("vllm, all cores", theirs, environment={"VLLM_CPU_OMP_THREADS_BIND": cores}),
        Contender("triptych", ours, is_ours=True),
    )


def environment(caches: Path) -> dict[str, str]:
    """Returns the caller's environment without variables that steer one contender alone.

    All compile caches are in ``caches``.
    """
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(_DROPPED) and name != _UNSET
    }
    return {
        **inherited,
        "XDG_CACHE_HOME": str(caches),
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


@contextlib.contextmanager
def running(contender: Contender, folder: Path, caches: Path) -> Iterator[Server]:
    """Runs a server until the block ends.

    Raises:
        ContenderFailed: The server exits, or does not answer within ten minutes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    port = free_port()
    # vLLM's processes import modules from their working directory, so only ours runs in the checkout.
    cwd = ROOT if contender.is_ours else folder
    variables = {**environment(caches), **contender.environment}
    with log.open("w") as output:
        started = time.monotonic()
        process = subprocess.Popen(
            contender.command(port, folder), cwd=cwd, env=variables, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    tree = psutil.Process(process.pid)
    try:
        _wait_until_healthy(contender.name, process, port, log)
        yield Server(port, time.monotonic() - started, tree)
    finally:
        _stop(contender.name, process, tree)


def _wait_until_healthy(name: str, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    with httpx.Client(timeout=5, trust_env=False) as client:
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if client.get(f"http://127.0.0.1:{port}/health").status_code == httpx.codes.OK:
                    return
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
                raise ContenderFailed(f"{name} exited before it served; its log is {log}")
    raise ContenderFailed(f"{name} did not serve within {_START_TIMEOUT_S:.0f} s; its log is {log}")


def _stop(name: str, process: subprocess.Popen[bytes], tree: psutil.Process) -> None:
    """Sends Ctrl-C, and kills processes that outlive it."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = tree.children(recursive=True)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_TIMEOUT_S)
    _, left = psutil.wait_procs(family, timeout=10)
    if process.poll() is None or left:
        print(f"{name} did not exit in time and is killed", file=sys.stderr)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def launched(*flags: str, variables: Mapping[str, str] | None = None) -> Iterator[str]:
    """Runs `triptych up` for the block; yields the gateway's URL.

    Raises:
        RuntimeError: if it ends before it serves.
    """
    command = [sys.executable, "-m", "deploy.cli", "up", "--port", str(_PORT), *flags]
    process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stderr.write(line)
            if "curl " in line:
                break
        else:
            raise RuntimeError("the services exited before they served")
        yield f"http://127.0.0.1:{_PORT}"
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
