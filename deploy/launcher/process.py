"""One child process: its command, its log, its pid file, its end."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deploy.launcher.parent import PARENT_VARIABLE


@dataclass(frozen=True)
class ChildSpec:
    """What to run, and where it leaves its traces."""

    name: str
    """Such as `gateway` or `worker-0`; the stem of its files in the run dir."""
    command: tuple[str, ...]
    run_dir: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the launcher's own."""

    @property
    def log(self) -> Path:
        """Where standard output and error go."""
        return self.run_dir / f"{self.name}.log"

    @property
    def pid_file(self) -> Path:
        """Exists exactly while the process runs; holds its id."""
        return self.run_dir / f"{self.name}.pid"


def describe_exit(status: int) -> str:
    """The way a process ended, for people: `exit code 1`, `SIGKILL`."""
    if status >= 0:
        return f"exit code {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"


class Child:
    """Runs one spec, at most one process at a time. A process leads its own group, so Ctrl-C reaches the launcher alone."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self._process: asyncio.subprocess.Process | None = None

    @property
    def running(self) -> bool:
        """Whether a process was started and its end has not been seen yet."""
        return self._process is not None

    async def start(self) -> None:
        """Starts the process; its output is appended to the log."""
        environment = {**os.environ, **self.spec.environment, PARENT_VARIABLE: str(os.getpid())}
        with self.spec.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        self.spec.pid_file.write_text(f"{self._process.pid}\n")

    async def wait(self) -> int:
        """Waits for the process' end, then removes its pid file and what is left of its group.

        Returns:
            The exit code, or minus the signal's number.
        """
        process = self._process
        if process is None:
            return 0
        status = await process.wait()
        if self._process is process:
            self._signal_group(process, signal.SIGKILL)
            self._process = None
            self.spec.pid_file.unlink(missing_ok=True)
        return status

    async def stop(self, grace_s: float) -> bool:
        """Asks the process to end; kills it after `grace_s` seconds.

        Returns:
            Whether it ended by itself.
        """
        process = self._process
        if process is None:
            return True
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(self.wait(), grace_s)
            return True
        except TimeoutError:
            self.kill()
            await self.wait()
            return False

    def kill(self) -> None:
        """Kills the process and its group at once."""
        if self._process is not None:
            self._signal_group(self._process, signal.SIGKILL)

    @staticmethod
    def _signal_group(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
