"""The cache of compiled grammars, and the processes that write them, which are killed when abandoned."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from protos.errors import Internal, InvalidArgument, Overloaded, TriptychError, Unavailable
from protos.service.logs import get_logger
from worker_svc.grammars.limits import PARAM, memory_limit, refusal, too_much
from worker_svc.grammars.matcher import Grammar, Matcher, Vocabulary
from worker_svc.grammars.spec import Spec, check_size

# Wall-clock limit of a compilation as a multiple of its CPU limit: cores may be busy.
_WALL_FACTOR: Final = 8.0
_START_TIMEOUT_S: Final = 60.0
# Refusals that are remembered, one message each.
_MAX_REFUSALS: Final = 1024
_MAX_WAITING: Final = 1024
_WARM_TOKENS: Final = 32
_RETRY_AFTER_MS: Final = 2000
# Signals by which people and the system end a process. Any other death during a compilation is the grammar's:
# an allocation failed, or the stack was used up.
_SENT_SIGNALS: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_TOKENIZER_FILE: Final = "tokenizer.json"


def can_constrain(folder: Path, end_ids: Sequence[int]) -> bool:
    """Whether a model supports grammars: its vocabulary can be read, and some token ends a sequence."""
    return (folder / _TOKENIZER_FILE).is_file() and bool(end_ids)


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
                [sys.executable, "-P", "-m", "worker_svc.grammars.compile_server", str(theirs.fileno()), *arguments],
                pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._connection = Connection(ours.detach())
        self.is_ready = False
        """Whether it has started and takes grammars."""

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: list[Any], timeout_s: float) -> dict[str, Any]:
        self._connection.send_bytes(json.dumps(request).encode())
        if not self.is_ready:
            self._receive(_START_TIMEOUT_S)
            self.is_ready = True
        answer: dict[str, Any] = json.loads(self._receive(timeout_s))
        return answer

    def _receive(self, timeout_s: float) -> bytes:
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        return self._connection.recv_bytes()

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> int:
        """Kills the process if it runs; returns its status in the form of `subprocess`."""
        self.kill()
        self._connection.close()
        return self._process.wait()


class _Compilation:
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
        """Sets the process to kill when the compilation is abandoned; raises `CancelledError` afterwards."""
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


class _CompileClient:
    """Owns the processes, at most as many as the caller's threads."""

    def __init__(self, folder: Path, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._arguments = [str(folder), str(vocab_size), *map(str, end_ids)]
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._closed = False

    def lower(self, spec: Spec, limits: CompilerLimits, compilation: _Compilation) -> str:
        """Returns a constraint as a grammar of llguidance; `InvalidArgument` is worth remembering."""
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
                retry_after_ms=_RETRY_AFTER_MS,
            ) from None
        except (EOFError, OSError):
            if compilation.abandoned:
                raise CancelledError from None
            raise _death_error(spec, process.end(), limits, is_ready=process.is_ready) from None
        finally:
            self._give_back(process, is_usable=is_usable)
        if refused := answer.get("refused"):
            raise refusal(refused)
        return str(answer["grammar"])

    def _take(self) -> _Process:
        with self._lock:
            if self._closed:
                raise Unavailable("the worker is shutting down", retry_after_ms=_RETRY_AFTER_MS)
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


def _death_error(spec: Spec, status: int, limits: CompilerLimits, *, is_ready: bool) -> TriptychError:
    if not is_ready or -status in _SENT_SIGNALS:
        how = f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
        return Unavailable(
            f"the {spec.kind} could not be compiled: the compiler {how}; retry", param=PARAM,
            retry_after_ms=_RETRY_AFTER_MS,
        )  # fmt: skip
    if status == 1:
        return Internal(
            f"the {spec.kind} could not be compiled: a bug; the worker's log has its traceback", param=PARAM
        )
    most = memory_limit(limits.compile_bytes)
    if status == -signal.SIGPROF:
        most = f"{limits.cpu_s:g} s of CPU time"
    return refusal(too_much(spec.kind, most))


class GrammarCompiler:
    """A least-recently-used cache of compiled grammars, by `Spec.key`. Thread-safe."""

    def __init__(
        self, folder: Path, vocab_size: int, end_ids: Sequence[int], limits: CompilerLimits | None = None
    ) -> None:
        """Starts no process yet: the first grammar does. `folder` is the model's, with `tokenizer.json`."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._end_ids = tuple(end_ids)
        self.limits = limits or CompilerLimits()
        self._pool = ThreadPoolExecutor(self.limits.threads, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._cached: OrderedDict[bytes, Grammar] = OrderedDict()
        self._live: weakref.WeakValueDictionary[bytes, Grammar] = weakref.WeakValueDictionary()
        """Cached grammars, and evicted grammars still in use by a matcher."""
        self._bytes_lock = threading.RLock()
        self._bytes = 0
        self._refusals: OrderedDict[bytes, InvalidArgument] = OrderedDict()
        self._in_progress: dict[bytes, _Compilation] = {}
        self._client = _CompileClient(folder, vocab_size, end_ids)
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        self.num_compiled = 0
        """Grammars compiled so far."""

    @property
    def cached_bytes(self) -> int:
        """Bytes of all live grammars, including evicted grammars of running requests."""
        return self._bytes

    async def prepare(self, spec: Spec) -> int:
        """Compiles a grammar unless it is cached; `find` returns it until it is evicted.

        If the caller is cancelled, it stops waiting; the compilation ends when the last caller has left.

        Returns:
            The size of the grammar in bytes.

        Raises:
            InvalidArgument: the spec is invalid, exceeds a limit or cannot be enforced.
            Overloaded: too many grammars are waiting, or the cores were too busy.
            Unavailable: the compiling process did not start, or was ended by a signal from outside.
            Internal: grammars cannot be compiled for this model.
        """
        future = self.submit(spec)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            self._leave(spec.key, future)
            raise

    def submit(self, spec: Spec) -> "Future[int]":
        """Like `prepare`, for callers without an event loop.

        Joins a compilation of the same spec in progress.
        """
        try:
            check_size(spec)
        except InvalidArgument as error:
            return _failed(error)
        with self._lock:
            if (found := self._get(spec.key)) is not None:
                return _done(found.num_bytes)
            if (joined := self._in_progress.get(spec.key)) is not None:
                joined.callers += 1
                return joined.future
            if (refusal := self._refusals.get(spec.key)) is not None:
                return _failed(refusal)
            if len(self._in_progress) >= _MAX_WAITING:
                return _failed(
                    Overloaded(
                        f"{_MAX_WAITING} grammars are waiting to be compiled", retry_after_ms=_RETRY_AFTER_MS
                    )
                )
            compilation = _Compilation()
            compilation.future = self._pool.submit(self._compile, spec, compilation)
            self._in_progress[spec.key] = compilation
        compilation.future.add_done_callback(lambda _: self._finish(spec.key, compilation))
        return compilation.future

    def find(self, spec: Spec) -> Grammar | None:
        """Returns the compiled grammar, if it is cached or in use, and marks it as used."""
        with self._lock:
            return self._get(spec.key)

    def refuse(self, spec: Spec, refusal: InvalidArgument) -> None:
        """Drops a grammar and answers later requests for it with `refusal`."""
        with self._lock:
            self._cached.pop(spec.key, None)
            self._live.pop(spec.key, None)
            self._refusals[spec.key] = refusal
            if len(self._refusals) > _MAX_REFUSALS:
                self._refusals.popitem(last=False)

    def close(self) -> None:
        """Ends the compiling processes; compilations in progress fail."""
        self._client.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _get(self, key: bytes) -> Grammar | None:
        found = self._live.get(key)
        if found is not None:
            self._cached[key] = found
            self._cached.move_to_end(key)
        return found

    def _count(self, size: int) -> None:
        """Adds to the bytes in use.

        Finalizers call it, so it may run on any thread, inside any other method.
        """
        with self._bytes_lock:
            self._bytes += size

    def _leave(self, key: bytes, future: "Future[int]") -> None:
        """Removes a caller.

        The last caller cancels a queued compilation or kills the process of a running one.
        """
        with self._lock:
            compilation = self._in_progress.get(key)
            if compilation is None or compilation.future is not future:
                return  # already finished
            compilation.callers -= 1
            if compilation.callers:
                return
            del self._in_progress[key]  # a later caller starts a new compilation
        if not compilation.future.cancel():
            compilation.abandon()

    def _finish(self, key: bytes, compilation: _Compilation) -> None:
        with self._lock:
            if self._in_progress.get(key) is compilation:
                del self._in_progress[key]

    def _compile(self, spec: Spec, compilation: _Compilation) -> int:
        """Compiles and caches a grammar; runs on a thread of the pool."""
        started = time.monotonic()
        try:
            text = self._client.lower(spec, self.limits, compilation)
            grammar = self._read(spec, text)
        except InvalidArgument as error:
            self.refuse(spec, error)
            raise
        size = grammar.num_bytes
        get_logger().info(
            "grammar_compiled", kind=spec.kind, bytes=size, seconds=round(time.monotonic() - started, 3)
        )
        with self._lock:
            self.num_compiled += 1
            self._cached[spec.key] = self._live[spec.key] = grammar
            self._count(size)
            weakref.finalize(grammar, self._count, -size).atexit = False
            while len(self._cached) > 1 and self.cached_bytes > self.limits.cache_bytes:
                self._cached.popitem(last=False)
        return size

    def _read(self, spec: Spec, text: str) -> Grammar:
        """Compiles a grammar and makes the masks along a short text.

        The text has random tokens (with a fixed seed), as a model might write. The engine builds its automata
        while it matches, so it builds them here, and not between two steps.
        """
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._folder, self._vocab_size, self._end_ids)
        try:
            grammar = Grammar(text, self._vocabulary)
            matcher = Matcher(grammar, self._end_ids, [])
            rng = np.random.default_rng(0)
            masks = torch.zeros((1, (self._vocab_size + 31) // 32), dtype=torch.int32)
            for _ in range(_WARM_TOKENS):
                matcher.fill_mask(masks, 0)
                bits = np.unpackbits(masks.numpy().view(np.uint8), bitorder="little")[: self._vocab_size]
                allowed = np.flatnonzero(bits)
                allowed = allowed[~np.isin(allowed, self._end_ids)]
                if not len(allowed) or not matcher.accept(int(rng.choice(allowed))):
                    break
        except (ValueError, InvalidArgument) as error:
            line = str(error).partition("\n")[0][:300]
            raise refusal(f"the {spec.kind} cannot be compiled: {line}") from error
        return grammar


def _done(size: int) -> "Future[int]":
    future: Future[int] = Future()
    future.set_result(int(size))
    return future


def _failed(error: Exception) -> "Future[int]":
    future: Future[int] = Future()
    future.set_exception(error)
    return future
