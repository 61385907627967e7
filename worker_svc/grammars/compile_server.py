"""The process that compiles grammars. It forks one child for each grammar.

xgrammar cannot be interrupted, and some grammars take it minutes or gigabytes. A child runs under limits that
the kernel enforces, so a timeout, an exhausted memory limit or a crash fails one grammar and nothing else.
The child checks and lowers the grammar, compiles it, walks through it as output would, and sends it back
serialized. If the child dies first, the server reports how. Measured with SmolLM2's vocabulary: the server
starts in 0.4 s and occupies 87 MB, a fork takes 8 ms, and serializing and reading back a grammar adds half of
its compile time.

`GrammarCompiler` starts it as `python -m worker_svc.grammars.compile_server FD FOLDER VOCAB EOS…`. It talks
over the socket `FD`, as `compile_protocol` describes.
"""

import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import socket
import sys
import time
import types
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from protos.errors import InvalidArgument
from worker_svc.grammars.compile_protocol import (
    CHILD_DIED,
    COMPILER_ERROR,
    DONE,
    INVALID_SPEC,
    WALL_FACTOR,
    Job,
    SerializedGrammar,
    dump_grammar,
    dump_status,
    dump_vocabulary,
    receive_job,
    send_answer,
)
from worker_svc.grammars.lowering.limits import MAX_WHITESPACE
from worker_svc.grammars.lowering.patterns import patterns_to_rules
from worker_svc.grammars.lowering.refusals import refusal
from worker_svc.grammars.markers import markers_in, resolve_token_names, with_marker_texts
from worker_svc.grammars.spec import Source, lower

# Model steps on the same cores have priority.
_NICENESS: Final = 10
# CPU seconds that one mask, and all masks of a walk, may take. The worker builds masks between two steps of
# the batch.
_MASK_S: Final = 0.25
_WALK_S: Final = 1.0
_WALK_TOKENS: Final = 32
# The walk takes the longest of this many random allowed tokens: whole words and separators, as models write
# them.
_WALK_CHOICES: Final = 12


class CompilerVocabulary(NamedTuple):
    """The model's vocabulary as the children use it."""

    core: Any
    """xgrammar's compiled module."""
    tokenizer: Any
    """xgrammar's `TokenizerInfo`."""
    end_ids: list[int]
    """Tokens that end a sequence."""
    specials: dict[str, int]
    """Ids of special tokens that do not end a sequence, by their text."""
    lengths: Any
    """Length of each token's text, at most 255; uint8 [vocab]."""

    def id_of(self, text: str) -> int:
        """Returns the id of the token with this text.

        Raises:
            InvalidArgument: no token has it.
        """
        if (found := self.specials.get(text)) is not None:
            return found
        with contextlib.suppress(ValueError):
            if text:
                return list(self.tokenizer.decoded_vocab()).index(text.encode(errors="surrogatepass"))
        raise refusal(f"structural_tag names the token {text!r}, which the vocabulary does not have")


def _load_xgrammar() -> Any:
    """Imports xgrammar's compiled module.

    Its Python modules import torch and transformers, which compiling does not need: 350 MB and seconds of
    start-up.
    """
    spec = find_spec("xgrammar")
    assert spec is not None
    sys.modules["torch"] = None  # type: ignore[assignment] # tvm_ffi works without torch
    package = types.ModuleType("xgrammar")
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules["xgrammar"] = package
    import xgrammar.load_binding  # noqa: F401 - registers the next import
    from xgrammar.base import _core  # type: ignore[attr-defined]

    return _core


def _load_vocabulary(core: Any, folder: Path, vocab_size: int, end_ids: list[int]) -> CompilerVocabulary:
    """Reads the tokenizer.

    Special tokens and ids beyond the tokenizer's own get no text, so they are never allowed.
    """
    import numpy as np
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = [""] * vocab_size
    specials = {
        token_id: str(added.content)
        for token_id, added in tokenizer.get_added_tokens_decoder().items()
        if added.special
    }
    for word, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size and token_id not in specials:
            words[token_id] = word
    detect = core.TokenizerInfo._detect_metadata_from_hf  # noqa: SLF001 - there is no public function
    kind = json.loads(detect(tokenizer.to_str()))
    info = core.TokenizerInfo(words, kind["vocab_type"], vocab_size, end_ids, kind["add_prefix_space"])
    markers = {
        text: token_id
        for token_id, text in specials.items()
        if text and token_id < vocab_size and token_id not in end_ids
    }
    lengths = np.array([min(len(word), 255) for word in info.decoded_vocab()], np.uint8)
    return CompilerVocabulary(core, info, end_ids, markers, lengths)


def _compile(vocabulary: CompilerVocabulary, job: Job) -> bytes:
    """Compiles a grammar, checks its cost and returns it encoded.

    Raises:
        InvalidArgument: our checks refuse the spec.
        Exception: xgrammar refuses it, or it is too large or too expensive to match.
    """
    core = vocabulary.core
    source, text = lower(job.spec)
    tokenizer, markers = vocabulary.tokenizer, dict[str, int]()
    if source == "tag":
        tag = json.loads(text)
        markers = markers_in(tag, vocabulary.specials)
        text = json.dumps(resolve_token_names(tag, vocabulary.id_of))
    if markers:
        words = with_marker_texts(tokenizer.decoded_vocab(), markers)
        tokenizer = core.TokenizerInfo(words, 0, len(words), vocabulary.end_ids, tokenizer.add_prefix_space())
    grammar = compile_lowered(core, core.GrammarCompiler(tokenizer, 1, False, -1), source, text)
    serialized = str(grammar.serialize_json())
    size = max(grammar.memory_size_bytes(), len(serialized))
    if size > job.grammar_bytes:
        raise ValueError(
            f"its compiled form has {size >> 20} MiB; the limit is {job.grammar_bytes >> 20} MiB"
        )
    _walk(core, grammar, tokenizer.vocab_size(), vocabulary)
    return dump_grammar(SerializedGrammar(tuple(sorted(markers.values())), serialized))


def compile_lowered(core: Any, compiler: Any, source: Source, text: str) -> Any:
    """Compiles a lowered spec.

    Args:
        core: xgrammar's compiled module.
        compiler: one of its compilers.
        source: kind of `text`.
        text: the lowered text, from `spec.lower`.
    """
    match source:
        case "json":
            # Strict, with white space anywhere up to a limit: a model that writes nothing else would never
            # end.
            schema = core.Grammar.from_json_schema(text, True, None, None, True, MAX_WHITESPACE, False, False)
            return compiler.compile_grammar_ebnf(patterns_to_rules(core, schema))
        case "regex":
            return compiler.compile_regex(text)
        case "ebnf":
            return compiler.compile_grammar_from_strings(text, "root")
        case "tag":
            return compiler.compile_grammar_ebnf(
                patterns_to_rules(core, core.Grammar.from_structural_tag(text))
            )


def _walk(core: Any, grammar: Any, vocab_size: int, vocabulary: CompilerVocabulary) -> None:
    """Walks through a grammar for some random tokens (with a fixed seed) and times every mask on the way.

    The first mask says little: a schema starts with a quote or a brace, and the expensive parts follow.

    Raises:
        ValueError: a mask takes too long, or all of them together do.
    """
    import numpy as np

    mask = np.zeros((1, (vocab_size + 31) // 32), np.int32)
    rng = np.random.default_rng(0)
    matcher = core.GrammarMatcher(grammar, None, False, -1, None)
    avoided = list(vocabulary.end_ids)
    total, previous = 0.0, -1
    for _ in range(_WALK_TOKENS):
        started = time.thread_time()
        matcher.fill_next_token_bitmask(mask, 0, False)
        spent = time.thread_time() - started
        total += spent
        if spent > _MASK_S or total > _WALK_S:
            raise ValueError(
                f"the mask of allowed tokens takes {spent:.2f} s for one token, {total:.2f} s so far,"
                " which would delay"
                " the whole batch; make it less ambiguous"
            )
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size])
        allowed = allowed[~np.isin(allowed, avoided)]
        if not len(allowed):
            if previous < 0:
                return
            # Dead end. Start again without the last token; another path may be longer.
            avoided.append(previous)
            matcher.reset()
            previous = -1
            continue
        candidates = rng.choice(allowed, _WALK_CHOICES)
        previous = int(candidates[vocabulary.lengths[candidates].argmax()])
        matcher.accept_token(previous, False)


@contextlib.contextmanager
def killed_on_hangup(connection: socket.socket) -> Iterator[None]:
    """Has the kernel kill this process if the other side hangs up within the context.

    This works whatever the compiler is doing. Incoming data would kill the process, too, so the worker sends
    nothing meanwhile.

    Raises:
        EOFError: the other side has hung up already.
    """
    descriptor = connection.fileno()
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(
        descriptor, fcntl.F_SETFL, flags | os.O_ASYNC
    )  # sends SIGIO, which ends the process by default
    if select.select([connection], [], [], 0)[0]:
        raise EOFError  # readable before any answer: only a hangup does that
    yield
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def _answer(vocabulary: CompilerVocabulary, job: Job) -> tuple[bytes, bytes]:
    """Compiles a job; returns the kind and the payload of the answer."""
    try:
        return DONE, _compile(vocabulary, job)
    except InvalidArgument as error:
        return INVALID_SPEC, error.message.encode(errors="replace")
    except MemoryError:
        return COMPILER_ERROR, b"std::bad_alloc"
    except Exception as error:  # noqa: BLE001 - the compiler's reason is the answer, whatever its type
        return COMPILER_ERROR, (str(error) or type(error).__name__).encode(errors="replace")


def _run_child(vocabulary: CompilerVocabulary, connection: socket.socket) -> None:
    """Receives a job, compiles it under its limits and sends the answer."""
    os.setsid()  # the worker handles Ctrl-C in a terminal
    job = receive_job(connection)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + job.compile_bytes,) * 2)
    seconds = max(1, round(job.cpu_s))
    # The soft limit's signal identifies the cause; the hard limit kills a child that ignores it.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 2))
    signal.setitimer(signal.ITIMER_REAL, job.cpu_s * WALL_FACTOR)  # SIGALRM's default action ends the child
    with killed_on_hangup(connection):
        answer = _answer(vocabulary, job)
    send_answer(connection, *answer)


def _reap(children: dict[int, socket.socket]) -> None:
    """Reaps exited children. Reports the wait status of failed children, which cannot have answered."""
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            return
        with children.pop(child) as connection, contextlib.suppress(OSError):
            connection.setblocking(False)
            if status:
                send_answer(connection, CHILD_DIED, dump_status(status))


def _serve(control: socket.socket, vocabulary: CompilerVocabulary) -> None:
    """Forks a child for each connection until the worker closes the control socket."""
    children: dict[int, socket.socket] = {}
    exited, wakeup = socket.socketpair()
    exited.setblocking(False)
    wakeup.setblocking(False)
    signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(exited, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if exited.fileno() in ready:
            exited.recv(4096)
            _reap(children)
        if control.fileno() not in ready:
            continue
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        connection = socket.socket(fileno=descriptors[0])
        child = os.fork()
        if child:
            children[child] = connection
            continue
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            for each in (control, exited, wakeup, *children.values()):
                each.close()
            _run_child(vocabulary, connection)
        except BaseException:  # noqa: BLE001 - the exit status is the report
            os._exit(1)
        os._exit(0)


def main() -> None:
    """Loads the vocabulary and serves until the worker closes the control socket."""
    control = socket.socket(fileno=int(sys.argv[1]))
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        vocabulary = _load_vocabulary(
            _load_xgrammar(), Path(sys.argv[2]), int(sys.argv[3]), [int(each) for each in sys.argv[4:]]
        )
    except Exception as error:  # noqa: BLE001 - the worker reports why the tokenizer cannot be read
        send_answer(control, COMPILER_ERROR, str(error).encode(errors="replace"))
        return
    # A library of xgrammar's has set a handler that prints a trace. It allocates memory, so a child that
    # crashes while it allocates some itself would hang instead of ending.
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    send_answer(
        control, DONE, dump_vocabulary(str(vocabulary.tokenizer.serialize_json()), vocabulary.specials)
    )
    # xgrammar prints warnings about features that are refused before they reach it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    _serve(control, vocabulary)


if __name__ == "__main__":
    main()
