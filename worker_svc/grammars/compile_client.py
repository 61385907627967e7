"""The worker's side of the compile server: starts the process and sends it grammars."""

import contextlib
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
from worker_svc.grammars.compile_protocol import (
    CHILD_DIED,
    COMPILER_ERROR,
    DONE,
    INVALID_SPEC,
    WALL_FACTOR,
    SerializedGrammar,
    load_grammar,
    load_status,
    load_vocabulary,
    receive_answer,
    send_job,
)
from worker_svc.grammars.compiler_limits import CompilerLimits
from worker_svc.grammars.lowering.refusals import PARAM, refusal
from worker_svc.grammars.markers import with_marker_texts
from worker_svc.grammars.spec import Spec

if TYPE_CHECKING:
    import xgrammar

_START_TIMEOUT_S: Final = 60.0
# Bytes per token of an extra vocabulary beside the token's text; measured with 49,152 tokens.
_TOKEN_BYTES: Final = 80


class Compilation:
    """A grammar that is being compiled or waits for a thread."""

    def __init__(self) -> None:
        self.future: Future[int] = Future()
        """Resolves to the bytes that the grammar occupies."""
        self.callers = 1
        """Number of callers that wait for it."""
        self.abandoned = False
        """Whether the last caller has left."""
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None

    def attach(self, connection: socket.socket) -> None:
        """Binds the compilation to its child; kills the child if the compilation is abandoned."""
        with self._lock:
            self._connection = connection
            if self.abandoned:
                _hang_up(connection)

    def abandon(self) -> None:
        """Kills the child that runs it, now or as soon as there is one."""
        with self._lock:
            self.abandoned = True
            if self._connection is not None:
                _hang_up(self._connection)


class GrammarVocabulary:
    """A vocabulary that compiled grammars refer to. It lives as long as the last of them."""

    def __init__(self, info: "xgrammar.TokenizerInfo", num_bytes: int = 0) -> None:
        self.info = info
        """xgrammar's object."""
        self.num_bytes = num_bytes
        """Bytes that it adds; 0 for the model's own vocabulary, which all grammars share."""
        self.is_counted = False
        """Whether the cache has counted these bytes."""


class CompileClient:
    """Owns the compile server, the process that forks a child for each grammar (`compile_server`)."""

    def __init__(self, folder: Path, vocab_size: int, end_ids: Sequence[int]) -> None:
        """Starts the server and waits until it has read the vocabulary.

        Raises:
            Internal: it did not start, or cannot read the vocabulary.
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
            answer, payload = receive_answer(self._control)
            if answer != DONE:
                raise Internal(
                    f"grammars cannot be compiled for this model: {payload.decode(errors='replace')}"
                )
            tokenizer, specials = load_vocabulary(payload)
            self._plain = GrammarVocabulary(xgrammar.TokenizerInfo.deserialize_json(tokenizer))
            self._with_markers: weakref.WeakValueDictionary[tuple[int, ...], GrammarVocabulary] = (
                weakref.WeakValueDictionary()
            )
            self._texts = {token_id: text for text, token_id in specials.items()}
        except (EOFError, OSError) as error:
            self.close()
            raise Internal(f"the grammar compile server did not start: {error}") from error
        except Internal:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the server is running."""
        return self._process.poll() is None

    def vocabulary(self, markers: tuple[int, ...]) -> GrammarVocabulary:
        """Returns the vocabulary in which these special tokens have their text. Not thread-safe."""
        import xgrammar

        if not markers:
            return self._plain
        if (found := self._with_markers.get(markers)) is not None:
            return found
        plain = self._plain.info
        words = with_marker_texts(plain.decoded_vocab, {self._texts[each]: each for each in markers})
        info = xgrammar.TokenizerInfo(
            words, xgrammar.VocabType.RAW, vocab_size=len(words), stop_token_ids=plain.stop_token_ids,
            add_prefix_space=plain.add_prefix_space,
        )  # fmt: skip
        num_bytes = sum(map(len, words)) + _TOKEN_BYTES * len(words)
        made = self._with_markers[markers] = GrammarVocabulary(info, num_bytes)
        return made

    def compile(self, spec: Spec, limits: CompilerLimits, compilation: Compilation) -> SerializedGrammar:
        """Compiles a grammar in a new child and waits for the answer.

        Raises:
            InvalidArgument: the spec is invalid or exceeds a limit on any machine; worth remembering.
            Overloaded: the cores were too busy.
            Internal: the compiler crashed, or the server ended.
            CancelledError: the last caller has left.
        """
        with self._fork_child() as connection:
            compilation.attach(connection)
            try:
                # The child enforces its own limits; this timeout covers a child that could not be forked.
                connection.settimeout(limits.cpu_s * WALL_FACTOR + _START_TIMEOUT_S)
                send_job(connection, spec, limits)
                answer, result = receive_answer(connection)
            except TimeoutError:
                raise _cores_busy(spec) from None
            except (EOFError, OSError):
                if compilation.abandoned:
                    raise CancelledError from None
                raise Internal(
                    "the grammar compile server ended; the next grammar starts a new one"
                    if not self.is_alive
                    else "the answer of the grammar compile server was cut off"
                ) from None
        if answer == DONE:
            return load_grammar(result)
        if compilation.abandoned:
            raise CancelledError
        if answer == CHILD_DIED:
            raise _death_error(spec, load_status(result), limits)
        text = result.decode(errors="replace")
        if answer == INVALID_SPEC:
            raise refusal(text)
        assert answer == COMPILER_ERROR
        raise refusal(f"the {spec.kind} cannot be compiled: {_reason(text, limits)}")

    def _fork_child(self) -> socket.socket:
        """Has the server fork a child; returns a connection to it."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            try:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise Internal("the grammar compile server ended") from None
            self._children.add(ours)
        return ours

    def close(self) -> None:
        """Ends the server and its children; waiting compilations fail."""
        for child in list(self._children):
            _hang_up(child)
        self._control.close()
        self._process.terminate()
        self._process.wait()


def _hang_up(connection: socket.socket) -> None:
    """Kills the child at the other end and ends the wait for it; see `compile_server.killed_on_hangup`."""
    with contextlib.suppress(OSError):  # the child has exited
        connection.shutdown(socket.SHUT_RDWR)


def _cores_busy(spec: Spec) -> Overloaded:
    return Overloaded(
        f"the {spec.kind} could not be compiled in time, because the cores were busy", retry_after_ms=2000
    )


def _death_error(spec: Spec, status: int, limits: CompilerLimits) -> TriptychError:
    """Returns the error for a child that ended without an answer."""
    cause = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if cause == signal.SIGXCPU:
        return refusal(
            f"the {spec.kind} cannot be compiled: it takes more than {limits.cpu_s:g} s of CPU time"
        )
    if cause == signal.SIGALRM:
        return _cores_busy(spec)
    how = f"ended by signal {cause}" if cause else f"ended with status {os.waitstatus_to_exitcode(status)}"
    return Internal(f"the {spec.kind} could not be compiled: the compiler {how}", param=PARAM)


def _reason(text: str, limits: CompilerLimits) -> str:
    """Returns xgrammar's message in one line, without the names of its source files."""
    if "bad_alloc" in text:
        return f"it takes more than {limits.compile_bytes >> 20} MiB of memory"
    line = " ".join(text.split())
    if line.startswith("[") and "] " in line:
        line = line.partition("] ")[2]
    if line.startswith("/") and ": " in line:
        line = line.partition(": ")[2]
    return line[:300] or "the compiler gave no reason"
