"""Compilations, and the process that they run in, as a worker sees them."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import TYPE_CHECKING, Final

from protos.errors import Internal, Overloaded, TriptychError
from worker_svc.grammars.compile_server import (
    DIED,
    DONE,
    JOB,
    KINDS,
    REFUSED,
    STATUS,
    WALL_FACTOR,
    WRONG,
    receive,
)
from worker_svc.grammars.lowering.limits import PARAM, CompilerLimits, refused
from worker_svc.grammars.markers import read_description, with_markers
from worker_svc.grammars.spec import Spec

if TYPE_CHECKING:
    import xgrammar

_START_TIMEOUT_S: Final = 60.0
# Bytes of a token in a vocabulary of its own, beside its text; measured with 49,152 of them.
_TOKEN_BYTES: Final = 80


class Compilation:
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


class Vocabulary:
    """A vocabulary as grammars are read with it; it lives as long as the last of them.

    Attributes:
        info: xgrammar's.
        num_bytes: what it occupies; 0 for that of the model, which all grammars have.
        is_new: nobody has counted them.
    """

    def __init__(self, info: "xgrammar.TokenizerInfo", num_bytes: int = 0) -> None:
        self.info = info
        self.num_bytes = num_bytes
        self.is_new = True


class Nursery:
    """The process that forks a child per grammar; see :mod:`~worker_svc.grammars.compile_server`."""

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
                [sys.executable, "-m", "worker_svc.grammars.compile_server", str(theirs.fileno()), str(folder),
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
            tokenizer, specials = read_description(payload)
            self._plain = Vocabulary(xgrammar.TokenizerInfo.deserialize_json(tokenizer))
            self._marked: weakref.WeakValueDictionary[tuple[int, ...], Vocabulary] = (
                weakref.WeakValueDictionary()
            )
            self._texts = {token_id: text for text, token_id in specials.items()}
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

    def vocabulary(self, markers: tuple[int, ...]) -> Vocabulary:
        """The vocabulary in which these special tokens have their text. Not thread-safe."""
        import xgrammar

        if not markers:
            return self._plain
        if (found := self._marked.get(markers)) is not None:
            return found
        plain = self._plain.info
        words = with_markers(plain.decoded_vocab, {self._texts[each]: each for each in markers})
        info = xgrammar.TokenizerInfo(
            words, xgrammar.VocabType.RAW, vocab_size=len(words), stop_token_ids=plain.stop_token_ids,
            add_prefix_space=plain.add_prefix_space,
        )  # fmt: skip
        made = self._marked[markers] = Vocabulary(info, sum(map(len, words)) + _TOKEN_BYTES * len(words))
        return made

    def compile(
        self, spec: Spec, limits: CompilerLimits, compilation: Compilation
    ) -> tuple[tuple[int, ...], str]:
        """A grammar's markers and itself, serialized.

        Raises:
            InvalidArgument: if it is wrong, or beyond a limit whatever else goes on: worth remembering.
            Overloaded: if the cores were too busy.
            Internal: if the compiler crashed, or its process ended.
            CancelledError: if nobody waits for it any more.
        """
        with self._bear() as connection:
            compilation.runs_in(connection)
            payload = spec.text.encode(errors="surrogatepass")
            header = JOB.pack(KINDS[spec.kind], limits.cpu_s, limits.memory, limits.largest, len(payload))
            try:
                # The child keeps its own limits; this one is for a child that could not even be born.
                connection.settimeout(limits.cpu_s * WALL_FACTOR + _START_TIMEOUT_S)
                connection.sendall(header + payload)
                answer, result = receive(connection)
            except TimeoutError:
                raise _busy(spec) from None
            except (EOFError, OSError):
                if compilation.abandoned:
                    raise CancelledError from None
                raise Internal(
                    "the process that compiles grammars ended; the next grammar starts another one"
                    if not self.is_alive
                    else "the answer of the process that compiles grammars was cut off"
                ) from None
        if answer == DONE:
            markers, _, serialized = result.partition(b"\n")
            return tuple(json.loads(markers)), serialized.decode()
        if compilation.abandoned:
            raise CancelledError
        if answer == DIED:
            raise _death(spec, STATUS.unpack(result)[0], limits)
        text = result.decode(errors="replace")
        if answer == WRONG:
            raise refused(text)
        assert answer == REFUSED
        raise refused(f"the {spec.kind} cannot be compiled: {_reason(text, limits)}")

    def _bear(self) -> socket.socket:
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


def _busy(spec: Spec) -> Overloaded:
    return Overloaded(
        f"the {spec.kind} could not be compiled in time, because the cores were busy", retry_after_ms=2000
    )


def _death(spec: Spec, status: int, limits: CompilerLimits) -> TriptychError:
    """What it means that a child ended without an answer."""
    cause = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if cause == signal.SIGXCPU:
        return refused(
            f"the {spec.kind} cannot be compiled: it takes more than {limits.cpu_s:g} s of CPU time"
        )
    if cause == signal.SIGALRM:
        return _busy(spec)
    how = f"ended by signal {cause}" if cause else f"ended with status {os.waitstatus_to_exitcode(status)}"
    return Internal(f"the {spec.kind} could not be compiled: the compiler {how}", param=PARAM)


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
