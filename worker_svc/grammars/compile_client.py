"""Processes that write a worker's constraints as grammars, started when needed, killed when abandoned."""

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from protos.errors import Internal, Overloaded, TriptychError
from worker_svc.grammars.limits import PARAM, refusal
from worker_svc.grammars.spec import Spec

# Wall-clock limit of a compilation as a multiple of its CPU limit: cores may be busy.
_WALL_FACTOR: Final = 8.0
_START_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True)
class CompilerLimits:
    """Limits on each grammar, and on all together."""

    threads: int = 2
    """Grammars compiled at the same time."""
    cpu_s: float = 5.0
    """CPU seconds of a compilation."""
    compile_bytes: int = 1 << 30
    """Bytes allocated by a compilation."""
    cache_bytes: int = 256 << 20
    """Bytes of all compiled grammars.

    Grammars in use by running requests count, and stay when the limit is exceeded.
    """


class _Process:
    """A process of `compile_server`, which answers in turn."""

    def __init__(self, arguments: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "worker_svc.grammars.compile_server", str(theirs.fileno()), *arguments],
                pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._connection = Connection(ours.detach())
        self._has_answered = False

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: list[Any], timeout_s: float) -> dict[str, Any]:
        """Returns the answer to a request.

        Raises:
            TimeoutError: there is none in time.
            EOFError, OSError: the process ended.
        """
        self._connection.send_bytes(json.dumps(request).encode())
        if not self._connection.poll(timeout_s + (0 if self._has_answered else _START_TIMEOUT_S)):
            raise TimeoutError
        answer = json.loads(self._connection.recv_bytes())
        self._has_answered = True
        return answer  # type: ignore[no-any-return]

    def kill(self) -> None:
        """Ends the wait of `ask`."""
        self._process.kill()

    def end(self) -> int:
        """Kills the process if it runs; returns its status in the form of `subprocess`."""
        self.kill()
        self._connection.close()
        return self._process.wait()


class Compilation:
    """A grammar being compiled or waiting for a thread."""

    def __init__(self) -> None:
        self.future: Future[int] = Future()
        """Resolves to the grammar's size in bytes."""
        self.callers = 1
        """Number of waiting callers."""
        self.abandoned = False
        """Whether nobody waits for it anymore."""
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def bind(self, process: _Process | None) -> None:
        """Sets the process to kill when the compilation is abandoned.

        Raises:
            CancelledError: it is abandoned already.
        """
        with self._lock:
            self._process = process
            if self.abandoned:
                raise CancelledError

    def abandon(self) -> None:
        """Kills its process, now or as soon as it is bound."""
        with self._lock:
            self.abandoned = True
            if self._process is not None:
                self._process.kill()


class CompileClient:
    """Owns the processes, at most as many as the caller's threads."""

    def __init__(self, folder: Path, vocab_size: int, end_ids: Sequence[int]) -> None:
        """Starts no process yet: the first grammar does."""
        self._arguments = [str(folder), str(vocab_size), *map(str, end_ids)]
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._closed = False

    def lower(self, spec: Spec, limits: CompilerLimits, compilation: Compilation) -> str:
        """Returns a constraint as a grammar of llguidance, written in a process of its own.

        Raises:
            InvalidArgument: the spec is invalid or exceeds a limit on any machine; worth remembering.
            Overloaded: the cores were too busy.
            Internal: the process crashed, or the worker is shutting down.
            CancelledError: the last caller left.
        """
        process, is_usable = self._take(), False
        try:
            compilation.bind(process)
            request = [spec.kind, spec.text, limits.cpu_s, limits.compile_bytes]
            answer = process.ask(request, limits.cpu_s * _WALL_FACTOR)
            compilation.bind(None)
            is_usable = not answer["is_last"]
        except TimeoutError:
            raise Overloaded(
                f"the {spec.kind} could not be compiled in time, because the cores were busy",
                retry_after_ms=2000,
            ) from None
        except (EOFError, OSError):
            if compilation.abandoned:
                raise CancelledError from None
            raise _death_error(spec, process.end(), limits) from None
        finally:
            self._give_back(process, is_usable=is_usable)
        if refused := answer.get("refused"):
            raise refusal(refused)
        return str(answer["grammar"])

    def _take(self) -> _Process:
        """Returns an idle process, or starts another."""
        with self._lock:
            if self._closed:
                raise Internal("the worker is shutting down")
            process = self._idle.pop() if self._idle else _Process(self._arguments)
            if not process.is_alive:
                process.end()
                process = _Process(self._arguments)
            self._busy.add(process)
            return process

    def _give_back(self, process: _Process, *, is_usable: bool) -> None:
        with self._lock:
            self._busy.discard(process)
            if is_usable and not self._closed:
                self._idle.append(process)
                return
        process.end()

    def close(self) -> None:
        """Ends all processes; waiting compilations fail."""
        with self._lock:
            self._closed = True
            for process in self._busy:
                process.kill()
            while self._idle:
                self._idle.pop().end()


def _death_error(spec: Spec, status: int, limits: CompilerLimits) -> TriptychError:
    """Returns the error for a process ending without an answer."""
    if status == -signal.SIGPROF:
        return refusal(
            f"the {spec.kind} cannot be compiled: it takes more than {limits.cpu_s:g} s of CPU time"
        )
    if status == -signal.SIGABRT:  # an allocation of llguidance failed
        return refusal(
            f"the {spec.kind} cannot be compiled: it takes more than {limits.compile_bytes >> 20} MiB of memory"
        )
    how = f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
    return Internal(f"the {spec.kind} could not be compiled: the compiler {how}", param=PARAM)
