"""The processes that compile a worker's grammars: started when needed, killed when nobody waits."""

import json
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from protos.errors import Internal, Overloaded, TriptychError
from worker_svc.grammars.compile_server import Job, SerializedGrammar
from worker_svc.grammars.refusals import PARAM, refusal
from worker_svc.grammars.spec import Spec
from worker_svc.grammars.special_tokens import with_marker_texts

if TYPE_CHECKING:
    import llguidance
    import xgrammar

_START_TIMEOUT_S: Final = 60.0
# Wall-clock limit of a compilation as a multiple of its CPU limit: cores may be busy.
_WALL_FACTOR: Final = 8.0
# Bytes per token of an extra vocabulary beside the token's text; measured with 49,152 tokens.
_TOKEN_BYTES: Final = 80


@dataclass(frozen=True)
class CompilerLimits:
    """Limits on each grammar, and on all together."""

    threads: int = 2
    """Grammars compiled at the same time."""
    cpu_s: float = 5.0
    """CPU seconds of a compilation."""
    compile_bytes: int = 1 << 30
    """Bytes allocated by a compilation."""
    grammar_bytes: int = 64 << 20
    """Bytes of a compiled grammar, serialized or not.

    Reading it back takes about ten times as much for a moment, so grammars are read in turn.
    """
    cache_bytes: int = 256 << 20
    """Bytes of all compiled grammars.

    Grammars in use by running requests count, and stay when the limit is exceeded.
    """


class _Process:
    """A process of `compile_server`, which compiles grammars in turn."""

    def __init__(self, arguments: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "worker_svc.grammars.compile_server", str(theirs.fileno()), *arguments],
                pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._connection = Connection(ours.detach())

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: bytes, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """Returns the answer to a request.

        Raises:
            TimeoutError: there is none in time.
            EOFError, OSError: the process ended.
        """
        self._connection.send_bytes(request)
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        return json.loads(self._connection.recv_bytes()), self._connection.recv_bytes()

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


class GrammarVocabulary:
    """A vocabulary of compiled grammars, which lives as long as the last of them."""

    def __init__(self, info: "xgrammar.TokenizerInfo", num_bytes: int = 0) -> None:
        self.info = info
        """xgrammar's object."""
        self.num_bytes = num_bytes
        """Its bytes; 0 for the model's own vocabulary, shared by all grammars."""
        self.is_counted = False
        """Whether the cache counts these bytes."""


class _LarkVocabulary:
    """A vocabulary in llguidance's form. Special tokens are matched by their ids alone."""

    bos_token_id = None

    def __init__(self, words: Sequence[bytes], specials: Mapping[int, str], ends: Sequence[int]) -> None:
        self.eos_token_id = ends[0]
        self.special_token_ids = sorted({*specials, *ends})
        self.tokens = [
            f"<{token_id}>".encode() if token_id in specials or token_id in ends else word
            for token_id, word in enumerate(words)
        ]
        self._ids = {word: token_id for token_id, word in reversed(list(enumerate(words))) if word}

    def __call__(self, text: bytes) -> list[int]:
        """Tokenizes a text of one token, or a text by its bytes."""
        if (found := self._ids.get(text)) is not None:
            return [found]
        return [self._ids[text[at : at + 1]] for at in range(len(text)) if text[at : at + 1] in self._ids]


class CompileClient:
    """Owns the processes, at most as many as the caller's threads."""

    def __init__(self, folder: Path, vocab_size: int, end_ids: Sequence[int]) -> None:
        """Starts the first process and reads the vocabulary from it.

        Raises:
            Internal: it did not start, or cannot read the vocabulary.
        """
        import xgrammar

        self._arguments = [str(folder), str(vocab_size), *map(str, end_ids)]
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._closed = False
        process, specials, tokenizer = self._start()
        self._idle.append(process)
        self._plain = GrammarVocabulary(xgrammar.TokenizerInfo.deserialize_json(tokenizer))
        self._with_markers: weakref.WeakValueDictionary[tuple[int, ...], GrammarVocabulary] = (
            weakref.WeakValueDictionary()
        )
        self._texts = {token_id: text for text, token_id in specials.items()}
        self._lark: llguidance.LLTokenizer | None = None

    def _start(self) -> tuple[_Process, dict[str, int], str]:
        """Returns a process, and its special tokens and vocabulary."""
        process = _Process(self._arguments)
        try:
            answer, tokenizer = process.ask(b"null", _START_TIMEOUT_S)
        except (EOFError, OSError) as error:
            process.end()
            raise Internal(f"the grammar compiler did not start: {error}") from error
        if reason := answer.get("failed"):
            process.end()
            raise Internal(f"grammars cannot be compiled for this model: {reason}")
        return process, answer["specials"], tokenizer.decode()

    def vocabulary(self, markers: tuple[int, ...]) -> GrammarVocabulary:
        """Returns the vocabulary with texts for these special tokens. Not thread-safe."""
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

    def lark_vocabulary(self) -> "llguidance.LLTokenizer":
        """Returns the vocabulary of llguidance's grammars. Not thread-safe."""
        if self._lark is None:
            from llguidance import LLTokenizer, TokenizerWrapper

            ends = list(self._plain.info.stop_token_ids)
            self._lark = LLTokenizer(
                TokenizerWrapper(_LarkVocabulary(self._plain.info.decoded_vocab, self._texts, ends)),
                eos_token=ends,
            )
        return self._lark

    def compile(self, spec: Spec, limits: CompilerLimits, compilation: Compilation) -> SerializedGrammar:
        """Compiles a grammar in a process of its own and waits for the answer.

        Raises:
            InvalidArgument: the spec is invalid or exceeds a limit on any machine; worth remembering.
            Overloaded: the cores were too busy.
            Internal: the compiler crashed.
            CancelledError: the last caller left.
        """
        job = Job(spec.kind, spec.text, limits.cpu_s, limits.compile_bytes, limits.grammar_bytes)
        process, is_usable = self._take(), False
        try:
            compilation.bind(process)
            answer, grammar = process.ask(job.dump(), limits.cpu_s * _WALL_FACTOR)
            compilation.bind(None)
            is_usable = not answer["is_last"]
        except TimeoutError:
            raise _cores_busy(spec) from None
        except (EOFError, OSError):
            if compilation.abandoned:
                raise CancelledError from None
            raise _death_error(spec, process.end(), limits) from None
        finally:
            self._give_back(process, is_usable=is_usable)
        if refused := answer.get("refused"):
            raise refusal(refused)
        if (failed := answer.get("failed")) is not None:
            raise refusal(f"the {spec.kind} cannot be compiled: {_reason(failed, limits)}")
        return SerializedGrammar(answer["source"], tuple(answer["markers"]), grammar.decode())

    def _take(self) -> _Process:
        """Returns an idle process, or starts another."""
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:
                    self._busy.add(process)
                    return process
                process.end()
        process = self._start()[0]
        with self._lock:
            self._busy.add(process)
            if self._closed:
                process.kill()
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


def _cores_busy(spec: Spec) -> Overloaded:
    return Overloaded(
        f"the {spec.kind} could not be compiled in time, because the cores were busy", retry_after_ms=2000
    )


def _death_error(spec: Spec, status: int, limits: CompilerLimits) -> TriptychError:
    """Returns the error for a process ending without an answer."""
    if status == -signal.SIGPROF:
        return refusal(
            f"the {spec.kind} cannot be compiled: it takes more than {limits.cpu_s:g} s of CPU time"
        )
    how = f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
    return Internal(f"the {spec.kind} could not be compiled: the compiler {how}", param=PARAM)


def _reason(text: str, limits: CompilerLimits) -> str:
    """Returns xgrammar's message in a line, without names of source files."""
    if "bad_alloc" in text:
        return f"it takes more than {limits.compile_bytes >> 20} MiB of memory"
    line = " ".join(text.split())
    if line.startswith("[") and "] " in line:
        line = line.partition("] ")[2]
    if line.startswith("/") and ": " in line:
        line = line.partition(": ")[2]
    return line[:300] or "the compiler gave no reason"
