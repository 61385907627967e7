"""Compiles grammars, at most a few at a time, and keeps them."""

import asyncio
import contextlib
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
from pathlib import Path
from typing import TYPE_CHECKING, Final

from protos.errors import Internal, InvalidArgument, Overloaded
from protos.logs import get_logger
from worker_svc.grammars.nursery import DONE, JOB, WALL_FACTOR, receive
from worker_svc.grammars.spec import PARAM, Source, Spec, lower

if TYPE_CHECKING:
    import xgrammar

_SOURCES: Final[dict[Source, bytes]] = {"json": b"j", "regex": b"r", "ebnf": b"e", "tag": b"t"}
_START_TIMEOUT_S: Final = 60.0
# Grammars that are known to be refused; a message each.
_MAX_REFUSALS: Final = 1024
_MAX_WAITING: Final = 1024
_TOKENIZER_FILE: Final = "tokenizer.json"


@dataclass(frozen=True)
class CompilerLimits:
    """What one grammar, and all of them together, may cost."""

    threads: int = 2
    """Grammars that are compiled at once."""
    cpu_s: float = 5.0
    """CPU time of one compilation."""
    memory: int = 1 << 30
    """Bytes of one compilation."""
    largest: int = 64 << 20
    """Bytes of one compiled grammar."""
    cache: int = 256 << 20
    """Bytes of all compiled grammars that no running request needs."""


def can_constrain(folder: Path, end_ids: Sequence[int]) -> bool:
    """Whether a model's output can be matched: its vocabulary can be read, and there is a token that ends a sequence."""
    return (folder / _TOKENIZER_FILE).is_file() and bool(end_ids)


class GrammarCompiler:
    """A cache of compiled grammars by :attr:`Spec.key`, least recently used ones out first. Safe to use from any thread."""

    def __init__(
        self, folder: Path, vocab_size: int, end_ids: Sequence[int], limits: CompilerLimits | None = None
    ) -> None:
        """Starts no process yet: the first grammar does.

        Args:
            folder: the model's, with its ``tokenizer.json``.
            vocab_size: of the model's logits.
            end_ids: tokens that end a sequence.
            limits: what may be spent.
        """
        self._folder = folder
        self._vocab_size = vocab_size
        self._end_ids = tuple(end_ids)
        self.limits = limits or CompilerLimits()
        self._pool = ThreadPoolExecutor(self.limits.threads, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._compiled: OrderedDict[bytes, xgrammar.CompiledGrammar] = OrderedDict()
        self._bytes = 0
        self._refusals: OrderedDict[bytes, InvalidArgument] = OrderedDict()
        self._under_way: dict[bytes, _Compilation] = {}
        self._nursery: _Nursery | None = None
        self._starting = threading.Lock()
        self._closed = False
        self.num_compiled = 0

    @property
    def cached_bytes(self) -> int:
        """What the kept grammars occupy."""
        return self._bytes

    async def prepare(self, spec: Spec) -> int:
        """Makes sure that :meth:`find` has a grammar, if only for a while. Whoever waits may be cancelled: the last one ends the compilation.

        Returns:
            The bytes that it occupies.

        Raises:
            InvalidArgument: if it is wrong, beyond a limit, or asks for what cannot be enforced.
            Overloaded: if too many are waiting.
            Internal: if grammars cannot be compiled at all.
        """
        future = self.submit(spec)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            self._leave(spec.key, future)
            raise

    def submit(self, spec: Spec) -> "Future[int]":
        """The same for callers that can wait; the same grammar again joins the compilation that is under way."""
        with self._lock:
            if (found := self._get(spec.key)) is not None:
                return _done(found.memory_size_bytes)
            if (joined := self._under_way.get(spec.key)) is not None:
                joined.callers += 1
                return joined.future
            if (refusal := self._refusals.get(spec.key)) is not None:
                return _failed(refusal)
            if len(self._under_way) >= _MAX_WAITING:
                return _failed(
                    Overloaded(f"{_MAX_WAITING} grammars are waiting to be compiled", retry_after_ms=2000)
                )
            compilation = _Compilation()
            compilation.future = self._pool.submit(self._compile, spec, compilation)
            self._under_way[spec.key] = compilation
        compilation.future.add_done_callback(lambda _: self._forget(spec.key, compilation))
        return compilation.future

    def find(self, spec: Spec) -> "xgrammar.CompiledGrammar | None":
        """A grammar that was compiled and is still kept."""
        with self._lock:
            return self._get(spec.key)

    def close(self) -> None:
        """Ends the process; compilations under way fail."""
        with self._starting:
            self._closed = True
            if self._nursery is not None:
                self._nursery.close()
                self._nursery = None
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _get(self, key: bytes) -> "xgrammar.CompiledGrammar | None":
        found = self._compiled.get(key)
        if found is not None:
            self._compiled.move_to_end(key)
        return found

    def _leave(self, key: bytes, future: "Future[int]") -> None:
        """One caller less. Without any, a compilation that waits for a thread never begins, and one that runs loses its process."""
        with self._lock:
            compilation = self._under_way.get(key)
            if compilation is None or compilation.future is not future:
                return  # it is over
            compilation.callers -= 1
            if compilation.callers:
                return
            del self._under_way[key]  # who comes now begins anew
        if not compilation.future.cancel():
            compilation.abandon()

    def _forget(self, key: bytes, compilation: "_Compilation") -> None:
        with self._lock:
            if self._under_way.get(key) is compilation:
                del self._under_way[key]

    def _compile(self, spec: Spec, compilation: "_Compilation") -> int:
        """On a thread of the pool."""
        import xgrammar

        try:
            source, text = lower(spec)
            started = time.monotonic()
            serialized = self._in_child(_SOURCES[source], text, spec.kind, compilation)
            grammar = xgrammar.CompiledGrammar.deserialize_json(serialized, self._ready().tokenizer)
        except InvalidArgument as error:
            with self._lock:
                self._refusals[spec.key] = error
                if len(self._refusals) > _MAX_REFUSALS:
                    self._refusals.popitem(last=False)
            raise
        size = int(grammar.memory_size_bytes)
        get_logger().info(
            "grammar_compiled", kind=spec.kind, bytes=size, seconds=round(time.monotonic() - started, 3)
        )
        with self._lock:
            self.num_compiled += 1
            self._compiled[spec.key] = grammar
            self._bytes += size
            while self._bytes > self.limits.cache and len(self._compiled) > 1:
                _, oldest = self._compiled.popitem(last=False)
                self._bytes -= int(oldest.memory_size_bytes)
        return size

    def _in_child(self, source: bytes, text: str, kind: str, compilation: "_Compilation") -> str:
        limits = self.limits
        nursery = self._ready()
        started = time.monotonic()
        with nursery.bear() as connection:
            compilation.runs_in(connection)
            payload = text.encode(errors="surrogatepass")
            header = JOB.pack(source, limits.cpu_s, limits.memory, limits.largest, len(payload))
            try:
                # The child keeps its own limits; this one is for a child that could not even be born.
                connection.settimeout(limits.cpu_s * WALL_FACTOR + _START_TIMEOUT_S)
                connection.sendall(header + payload)
                answer, result = receive(connection)
            except (EOFError, OSError):
                answer, result = b"", b""
        if answer == DONE:
            return result.decode()
        if not answer:
            if compilation.abandoned:
                raise CancelledError
            if not nursery.is_alive:
                raise Internal(
                    "the process that compiles grammars ended; the next grammar starts another one"
                )
            seconds = time.monotonic() - started
            reason = (
                f"it takes more than {limits.cpu_s:g} s of CPU time"
                if seconds > limits.cpu_s * 0.9
                else "the compiler crashed on it"
            )
        else:
            reason = _reason(result.decode(errors="replace"), limits)
        raise InvalidArgument(f"the {kind} cannot be compiled: {reason}", param=PARAM)

    def _ready(self) -> "_Nursery":
        with self._starting:
            if self._closed:
                raise Internal("the worker is ending")
            if self._nursery is not None and not self._nursery.is_alive:
                self._nursery.close()
                self._nursery = None
            if self._nursery is None:
                self._nursery = _Nursery(self._folder, self._vocab_size, self._end_ids)
            return self._nursery


class _Compilation:
    """One grammar that is compiled or waits for that.

    Attributes:
        future: the bytes that it occupies.
        callers: how many wait for it.
        abandoned: nobody does any more.
    """

    def __init__(self) -> None:
        self.future: Future[int] = Future()
        self.callers = 1
        self.abandoned = False
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None

    def runs_in(self, connection: socket.socket) -> None:
        """A child was born for it."""
        with self._lock:
            self._connection = connection
            if self.abandoned:
                _hang_up(connection)

    def abandon(self) -> None:
        """Ends its child, now or when it is born."""
        with self._lock:
            self.abandoned = True
            if self._connection is not None:
                _hang_up(self._connection)


class _Nursery:
    """The process that forks a child per grammar; see :mod:`~worker_svc.grammars.nursery`."""

    def __init__(self, folder: Path, vocab_size: int, end_ids: Sequence[int]) -> None:
        """Starts it and waits until it has read the vocabulary.

        Raises:
            Internal: if it cannot.
        """
        import xgrammar

        self._control, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self._children: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "worker_svc.grammars.nursery", str(theirs.fileno()), str(folder),
                 str(vocab_size), *map(str, end_ids)],
                pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        try:
            self._control.settimeout(_START_TIMEOUT_S)
            answer, payload = receive(self._control)
            if answer != DONE:
                raise Internal(
                    f"grammars cannot be compiled for this model: {payload.decode(errors='replace')}"
                )
            self.tokenizer = xgrammar.TokenizerInfo.deserialize_json(payload.decode())
        except (EOFError, OSError) as error:
            self.close()
            raise Internal(f"the process that compiles grammars did not start: {error}") from error
        except Internal:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def bear(self) -> socket.socket:
        """A connection to a new child."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            try:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise Internal("the process that compiles grammars ended") from None
            self._children.add(ours)
        return ours

    def close(self) -> None:
        """Ends it, and the wait for its children."""
        for child in list(self._children):
            _hang_up(child)
        self._control.close()
        self._process.terminate()
        self._process.wait()


def _hang_up(connection: socket.socket) -> None:
    """Ends the child at the other end, and the wait for it; see ``nursery.ended_by``."""
    with contextlib.suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)


def _reason(text: str, limits: CompilerLimits) -> str:
    """Xgrammar's own words, in one line and without its source files' names."""
    if "bad_alloc" in text:
        return f"it takes more than {limits.memory >> 20} MiB of memory"
    line = " ".join(text.split())
    if line.startswith("[") and "] " in line:
        line = line.partition("] ")[2]
    if line.startswith("/") and ": " in line:
        line = line.partition(": ")[2]
    return line[:300] or "the compiler gave no reason"


def _done(size: int) -> "Future[int]":
    future: Future[int] = Future()
    future.set_result(int(size))
    return future


def _failed(error: Exception) -> "Future[int]":
    future: Future[int] = Future()
    future.set_exception(error)
    return future


__all__ = ["CompilerLimits", "GrammarCompiler", "can_constrain"]
