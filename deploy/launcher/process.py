"""Runs a child process with a log and a pid file; a child ends when its launcher dies."""

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from protos.service import private_files

# -P: a `deploy` in the current folder, which may be a stranger's, is not ours.
COMMAND = (sys.executable, "-P", "-m", "deploy.cli")
"""The words of a child's command before its name and flags."""
PARENT_VARIABLE = "TRIPTYCH_LAUNCHER_PID"
"""The environment variable that tells a child its launcher's process id."""
_PR_SET_PDEATHSIG = 1


def die_with_launcher(environ: MutableMapping[str, str]) -> None:
    """Asks the kernel to kill this process when its launcher dies, if it has one.

    The child itself asks, so that the launcher runs no code between fork and exec. Takes the launcher's id
    out of `environ`: the child's own children must not use it.
    """
    launcher = environ.pop(PARENT_VARIABLE, "")
    if not launcher or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(launcher):
        raise SystemExit("the launcher is gone")


@dataclass(frozen=True)
class ChildSpec:
    """The command of a child, and the folder for its log and its pid file."""

    name: str
    """For example `gateway` or `worker-0`; the stem of its files in the run dir."""
    command: tuple[str, ...]
    """The program and its arguments."""
    run_dir: Path
    """Folder for the log and the pid file."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables to add to the launcher's own."""
    worker_flags: tuple[str, ...] | None = None
    """The flags if it is a worker, which a standby can replace; `None` for another service."""
    has_log: bool = True
    """Whether its output goes to the log; otherwise it goes where the launcher's goes."""

    @property
    def log(self) -> Path:
        """The file that receives standard output and error."""
        return self.run_dir / f"{self.name}.log"

    @property
    def pid_file(self) -> Path:
        """The file with the process id; it exists while the process runs, unless the disk is full."""
        return self.run_dir / f"{self.name}.pid"


def worker_spec(
    name: str, flags: tuple[str, ...], run_dir: Path, environment: Mapping[str, str], *, has_log: bool = True
) -> ChildSpec:
    """Returns the command of a worker with these flags; for the other arguments see `ChildSpec`."""
    command = (*COMMAND, "worker", *flags)
    return ChildSpec(name, command, run_dir, environment, worker_flags=flags, has_log=has_log)


def _kill_group(leader: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader.pid, signal.SIGKILL)


def _reap_group(leader: int) -> None:
    """Reaps the killed rest of a group: as a container's first process, the launcher inherits orphans."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-leader, 0)


def describe_exit(status: int) -> str:
    """Returns how a process ended, for people: `exit code 1` or `SIGKILL`."""
    if status >= 0:
        return f"exit code {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"


class Child:
    """Runs the process of a spec, and later its successors.

    Each process leads its own group, so Ctrl-C in a terminal reaches only the launcher.
    """

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self._process: asyncio.subprocess.Process | None = None

    @property
    def running(self) -> bool:
        """Whether a process was started and `wait` has not seen it end."""
        return self._process is not None

    async def start(self, *, with_input: bool = False) -> None:
        """Starts the process and appends its output to the log. `with_input` allows `hand_over`."""
        environment = {**os.environ, **self.spec.environment, PARENT_VARIABLE: str(os.getpid())}
        with contextlib.ExitStack() as stack:
            output: IO[bytes] | int | None = None
            if self.spec.has_log:
                try:
                    output = stack.enter_context(private_files.open_binary(self.spec.log, "ab"))
                except OSError as error:  # such as a full disk: a log must not end the services
                    self._report_missing(self.spec.log, error)
                    output = asyncio.subprocess.DEVNULL
            process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                stdin=asyncio.subprocess.PIPE if with_input else asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        self.adopt(process)

    def adopt(self, process: asyncio.subprocess.Process) -> None:
        """Takes a running process for this child's."""
        self._process = process
        try:
            private_files.write_text(self.spec.pid_file, f"{process.pid}\n")
        except OSError as error:
            self._report_missing(self.spec.pid_file, error)
            with contextlib.suppress(OSError):
                self.spec.pid_file.unlink(missing_ok=True)

    def _report_missing(self, file: Path, error: OSError) -> None:
        with contextlib.suppress(OSError):  # standard error may be on the full disk, too
            print(f"{self.spec.name} runs without {file}: {error.strerror}", file=sys.stderr, flush=True)

    def hand_over(self, message: bytes) -> asyncio.subprocess.Process | None:
        """Writes to the process' standard input, and gives the process away; `None` if it has ended."""
        process = self._process
        if process is None or process.returncode is not None or process.stdin is None:
            return None
        process.stdin.write(message)
        process.stdin.close()
        self._process = None
        self.spec.pid_file.unlink(missing_ok=True)
        return process

    async def wait(self) -> int:
        """Waits for the process to end, removes its pid file and kills the rest of its group.

        Returns:
            The exit code, or the negated number of the signal that killed the process.
        """
        process = self._process
        if process is None:
            return 0
        status = await process.wait()
        if self._process is process:
            _kill_group(process)
            await asyncio.to_thread(_reap_group, process.pid)
            self._process = None
            self.spec.pid_file.unlink(missing_ok=True)
        return status

    async def stop(self, drain_s: float, grace_s: float = 0.0) -> bool:
        """Stops the process: SIGTERM, after `drain_s` seconds SIGINT, and SIGKILL `grace_s` seconds later.

        Returns:
            Whether it ended without SIGKILL.
        """
        for number, wait_s in ((signal.SIGTERM, drain_s), (signal.SIGINT, grace_s)):
            if self._process is None:
                return True
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wait(), wait_s)
                return True
        self.kill()
        await self.wait()
        return False

    def rotate_log(self, limit_bytes: int) -> None:
        """Moves the content of a log above ``limit_bytes`` to `.log.1`.

        The process keeps writing to the same file, which it opened for appending. On a full disk the content
        is dropped.
        """
        log = self.spec.log
        try:
            if log.stat().st_size <= limit_bytes:
                return
        except FileNotFoundError:
            return
        older = log.with_suffix(".log.1")
        try:
            older.unlink(missing_ok=True)  # a link would be followed
            shutil.copyfile(log, older)
        except OSError:
            older.unlink(missing_ok=True)
        os.truncate(log, 0)

    def kill(self) -> None:
        """Kills the process and its group at once."""
        if self._process is not None:
            _kill_group(self._process)
