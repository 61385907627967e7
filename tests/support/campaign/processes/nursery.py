"""Starts workers as forks of one process that has imported all they need, and restarts those that end.

A worker's imports take most of its start, and a campaign restarts workers hundreds of times. A fork is a
process of its own from then on: it can be killed, frozen and refused disk space like any other.

``python -m tests.support.campaign.processes.nursery`` is that process. It reads a line of JSON for each
worker to start, with its name, folder and flags. It writes a line with name, id and exit status whenever a
worker has started or ended.
"""

import asyncio
import contextlib
import gc
import json
import os
import select
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from deploy.launcher.process import PARENT_VARIABLE, die_with_launcher
from tests.support.campaign.processes import service_process
from tests.support.paths import ROOT

_LOOK_S: Final = 0.02
_RESTART_S: Final = 0.1


class Nursery:
    """Runs workers; each has a pid file and a log, as with the launcher."""

    def __init__(self, folder: Path, flags: Mapping[str, Sequence[str]]) -> None:
        """Prepares workers with these names and flags."""
        self._folder = folder
        self._flags = flags
        self._pids: dict[str, int] = {}

    async def run(self) -> None:
        """Keeps the workers running until cancelled."""
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", PARENT_VARIABLE: str(os.getpid()),
        }  # fmt: skip
        with (self._folder / "nursery.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.support.campaign.processes.nursery",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, env=environment,
            )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            for name in self._flags:
                self._start(name, process.stdin)
            async for line in process.stdout:
                name, pid, status = json.loads(line)
                if status is None:
                    self._pids[name] = pid
                    self._pid_file(name).write_text(f"{pid}\n")
                else:
                    self._end(name)
                    asyncio.get_running_loop().call_later(_RESTART_S, self._start, name, process.stdin)
            raise RuntimeError(f"the nursery ended; see {self._folder / 'nursery.log'}")
        finally:
            for name in tuple(self._pids):
                self._end(name)
            if process.returncode is None:
                process.kill()
            await process.wait()

    def _start(self, name: str, orders: asyncio.StreamWriter) -> None:
        if not orders.is_closing():
            orders.write(json.dumps([name, str(self._folder), list(self._flags[name])]).encode() + b"\n")

    def _end(self, name: str) -> None:
        """Kills what a worker leaves behind, such as its compilers of grammars."""
        self._pid_file(name).unlink(missing_ok=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pids.pop(name), signal.SIGKILL)

    def _pid_file(self, name: str) -> Path:
        return self._folder / f"{name}.pid"


def main() -> int:
    """Forks workers until its input ends."""
    die_with_launcher(os.environ)
    _import()
    names: dict[int, str] = {}
    orders = b""
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], _LOOK_S)
        if readable:
            piece = os.read(sys.stdin.fileno(), 65536)
            if not piece:
                return 0
            *lines, orders = (orders + piece).split(b"\n")
            for line in lines:
                name, folder, flags = json.loads(line)
                pid = _fork(name, Path(folder), flags)
                names[pid] = name
                _say(name, pid, None)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                _say(names.pop(pid), pid, os.waitstatus_to_exitcode(status))


def _import() -> None:
    from worker_svc import service  # noqa: F401 - imports what a worker needs
    from worker_svc.vllm_adapter import model, startup  # noqa: F401
    from worker_svc.vllm_platform import prepare_libraries

    prepare_libraries()
    startup.prepare("cpu")
    gc.collect()
    gc.freeze()
    # A fork has the calling thread alone.
    assert threading.active_count() == 1


def _say(name: str, pid: int, status: int | None) -> None:
    print(json.dumps([name, pid, status]), flush=True)


def _fork(name: str, folder: Path, flags: list[str]) -> int:
    nursery = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        os.environ[PARENT_VARIABLE] = str(nursery)
        with Path(os.devnull).open("rb") as nothing, (folder / f"{name}.log").open("ab") as log:
            os.dup2(nothing.fileno(), sys.stdin.fileno())
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())
        code = service_process.run(name, folder, flags)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
