"""The process in which grammars are compiled: it waits, and forks a child for each of them.

xgrammar cannot be interrupted, and some grammars take it minutes or gigabytes. A child has limits of its own that the kernel keeps, and
whatever becomes of it (out of time, out of memory, a crash of the compiler) is one grammar's failure and nobody else's. It checks and lowers
the grammar, compiles it, walks through it as output would and sends it serialized; if it ends before that, the nursery tells how. Measured with SmolLM2's
vocabulary: the nursery starts in 0.4 s and occupies 87 MB, a fork takes 8 ms, and serializing and reading back costs half as much again as
compiling.

Started by :class:`~worker_svc.grammars.compiler.GrammarCompiler` as ``python -m worker_svc.grammars.compile_server FD FOLDER VOCAB EOS…``. Over
the socket ``FD`` it answers a description of the vocabulary, or why it has none, and then receives one file descriptor per grammar.
"""

import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
import types
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from protos.errors import InvalidArgument
from worker_svc.grammars.lowering.limits import MAX_WHITESPACE, refused
from worker_svc.grammars.lowering.patterns import with_rules
from worker_svc.grammars.markers import described, markers_in, numbered, with_markers
from worker_svc.grammars.spec import Kind, Source, Spec, lower

HEADER: Final = struct.Struct("<cQ")
"""Of every answer: a kind, and the bytes that follow."""
JOB: Final = struct.Struct("<cdQQQ")
"""Of every job: the kind of its spec, CPU seconds, bytes of memory, bytes of the result at most, bytes of text that follow."""
STATUS: Final = struct.Struct("<i")
"""How a child ended, as ``waitpid`` has it."""
KINDS: Final[dict[Kind, bytes]] = {
    "json_schema": b"j", "json_object": b"o", "regex": b"r", "grammar": b"g", "choice": b"c", "structural_tag": b"t",
}  # fmt: skip
DONE: Final = b"+"
"""A vocabulary, or the ids of a grammar's markers as a JSON list, a line feed and the grammar."""
WRONG: Final = b"!"
"""What is wrong with the spec, in our words."""
REFUSED: Final = b"-"
"""Why it cannot be compiled, in xgrammar's."""
DIED: Final = b"x"
"""No answer came; a :data:`STATUS` follows."""

# Steps of a model on the same cores come first.
_NICENESS: Final = 10
# A child that has the cores to itself is done when its CPU time is; one that waits for them gets this much longer.
WALL_FACTOR: Final = 8.0
# CPU seconds of a mask, and of those of a whole walk: the worker makes them between two steps, and everybody waits.
_MASK_S: Final = 0.25
_WALK_S: Final = 1.0
_WALK_TOKENS: Final = 32
# Of so many tokens that are allowed the longest is taken: words and what stands between them, as models write them.
_WALK_CHOICES: Final = 12


class Job(NamedTuple):
    """One grammar to compile."""

    spec: Spec
    cpu_s: float
    memory: int
    """Bytes beside what the nursery has."""
    largest: int
    """Bytes that the compiled grammar may occupy, serialized or not."""


class Vocabulary(NamedTuple):
    """What a child finds when it is born."""

    core: Any
    """Xgrammar's compiled half."""
    tokenizer: Any
    end_ids: list[int]
    specials: dict[str, int]
    """Special tokens that end nothing, by their text."""
    lengths: Any
    """Of each token's text, uint8 [vocab]."""

    def id_of(self, text: str) -> int:
        """The token that has a text.

        Raises:
            InvalidArgument: if none has.
        """
        if (found := self.specials.get(text)) is not None:
            return found
        with contextlib.suppress(ValueError):
            if text:
                return list(self.tokenizer.decoded_vocab()).index(text.encode(errors="surrogatepass"))
        raise refused(f"structural_tag names the token {text!r}, which the vocabulary does not have")


def send(connection: socket.socket, kind: bytes, payload: bytes) -> None:
    """Writes an answer."""
    connection.sendall(HEADER.pack(kind, len(payload)) + payload)


def receive(connection: socket.socket) -> tuple[bytes, bytes]:
    """Reads an answer.

    Raises:
        EOFError: if the other side ended before it was complete.
    """
    kind, size = HEADER.unpack(receive_exactly(connection, HEADER.size))
    return kind, receive_exactly(connection, size)


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Reads so many bytes.

    Raises:
        EOFError: if the other side ended before.
    """
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = connection.recv_into(view[done:])
        if not count:
            raise EOFError
        done += count
    return bytes(data)


def _load_xgrammar() -> Any:
    """Xgrammar's compiled half.

    Its Python half imports torch and transformers, which compiling does not need: 350 MB and seconds of every start.
    """
    spec = find_spec("xgrammar")
    assert spec is not None
    sys.modules["torch"] = None  # type: ignore[assignment] # tvm_ffi goes without, if there is none
    package = types.ModuleType("xgrammar")
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules["xgrammar"] = package
    import xgrammar.load_binding  # noqa: F401 - registers what the next line names
    from xgrammar.base import _core  # type: ignore[attr-defined]

    return _core


def _vocabulary(core: Any, folder: Path, vocab_size: int, end_ids: list[int]) -> Vocabulary:
    """The vocabulary as xgrammar wants it; ids beyond the tokenizer's own have no text and are never allowed."""
    import numpy as np
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = [""] * vocab_size
    # Nor have special tokens: they are no part of the text that clients read.
    specials = {
        token_id: str(added.content)
        for token_id, added in tokenizer.get_added_tokens_decoder().items()
        if added.special
    }
    for word, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size and token_id not in specials:
            words[token_id] = word
    kind = json.loads(core.TokenizerInfo._detect_metadata_from_hf(tokenizer.to_str()))  # noqa: SLF001 - its only reader of them
    info = core.TokenizerInfo(words, kind["vocab_type"], vocab_size, end_ids, kind["add_prefix_space"])
    markers = {
        text: token_id
        for token_id, text in specials.items()
        if text and token_id < vocab_size and token_id not in end_ids
    }
    lengths = np.array([min(len(word), 255) for word in info.decoded_vocab()], np.uint8)
    return Vocabulary(core, info, end_ids, markers, lengths)


def _compile(vocabulary: Vocabulary, job: Job) -> bytes:
    """A grammar's markers and itself, serialized.

    Raises:
        InvalidArgument: if the spec is wrong, in our words.
        Exception: whatever xgrammar raises.
    """
    core = vocabulary.core
    source, text = lower(job.spec)
    tokenizer, markers = vocabulary.tokenizer, dict[str, int]()
    if source == "tag":
        tag = json.loads(text)
        markers = markers_in(tag, vocabulary.specials)
        text = json.dumps(numbered(tag, vocabulary.id_of))
    if markers:
        words = with_markers(tokenizer.decoded_vocab(), markers)
        tokenizer = core.TokenizerInfo(words, 0, len(words), vocabulary.end_ids, tokenizer.add_prefix_space())
    grammar = compiled(core, core.GrammarCompiler(tokenizer, 1, False, -1), source, text)
    serialized = str(grammar.serialize_json()).encode()
    size = max(grammar.memory_size_bytes(), len(serialized))
    if size > job.largest:
        raise ValueError(f"its compiled form has {size >> 20} MiB; at most {job.largest >> 20} MiB are kept")
    _walk(core, grammar, tokenizer.vocab_size(), vocabulary)
    return json.dumps(sorted(markers.values())).encode() + b"\n" + serialized


def compiled(core: Any, compiler: Any, source: Source, text: str) -> Any:
    """What a lowered spec becomes.

    Args:
        core: xgrammar's compiled half.
        compiler: one of its compilers.
        source: of ``text``.
        text: what :func:`~worker_svc.grammars.spec.lower` made.
    """
    match source:
        case "json":
            # Any order of whitespace up to so many characters (a model that writes nothing else would never end); strict.
            schema = core.Grammar.from_json_schema(text, True, None, None, True, MAX_WHITESPACE, False, False)
            return compiler.compile_grammar_ebnf(with_rules(core, schema))
        case "regex":
            return compiler.compile_regex(text)
        case "ebnf":
            return compiler.compile_grammar_from_strings(text, "root")
        case "tag":
            return compiler.compile_grammar_ebnf(with_rules(core, core.Grammar.from_structural_tag(text)))


def _walk(core: Any, grammar: Any, vocab_size: int, vocabulary: Vocabulary) -> None:
    """Goes along a grammar for some tokens, at random but the same way each time, and makes each mask, as the worker may have to between two steps.

    A first mask says little: that of a schema allows a quote or a brace, and what is expensive comes behind.

    Raises:
        ValueError: if a mask takes longer than others should wait, or all of them do.
    """
    import numpy as np

    mask = np.zeros((1, (vocab_size + 31) // 32), np.int32)
    numbers = np.random.default_rng(0)
    matcher = core.GrammarMatcher(grammar, None, False, -1, None)
    avoided = list(vocabulary.end_ids)
    walked, before = 0.0, -1
    for _ in range(_WALK_TOKENS):
        started = time.thread_time()
        matcher.fill_next_token_bitmask(mask, 0, False)
        spent = time.thread_time() - started
        walked += spent
        if spent > _MASK_S or walked > _WALK_S:
            raise ValueError(
                f"telling which tokens may come takes {spent:.2f} s for a token, {walked:.2f} s so far, and everybody waits for it;"
                " make it less ambiguous"
            )
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size])
        allowed = allowed[~np.isin(allowed, avoided)]
        if not len(allowed):
            if before < 0:
                return
            # It leads to an end. Begin again and take another way, which may be a longer one.
            avoided.append(before)
            matcher.reset()
            before = -1
            continue
        some = numbers.choice(allowed, _WALK_CHOICES)
        before = int(some[vocabulary.lengths[some].argmax()])
        matcher.accept_token(before, False)


@contextlib.contextmanager
def ended_by(connection: socket.socket) -> Iterator[None]:
    """Meanwhile the kernel ends this process as soon as the other side hangs up, whatever the compiler is doing then.

    Nothing may be sent or received meanwhile: that would end it, too.
    """
    descriptor = connection.fileno()
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)  # SIGIO, which nobody handles
    if select.select([connection], [], [], 0)[0]:
        raise EOFError  # it has hung up already: nothing else can have come
    yield
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def _answer(vocabulary: Vocabulary, job: Job) -> tuple[bytes, bytes]:
    """Kind and content of what a child has to say."""
    try:
        return DONE, _compile(vocabulary, job)
    except InvalidArgument as error:
        return WRONG, error.message.encode(errors="replace")
    except MemoryError:
        return REFUSED, b"std::bad_alloc"
    except Exception as error:  # noqa: BLE001 - whatever the compiler says is the answer
        return REFUSED, (str(error) or type(error).__name__).encode(errors="replace")


def _live(vocabulary: Vocabulary, connection: socket.socket) -> None:
    """A child's whole life."""
    os.setsid()  # a terminal's Ctrl-C is for the worker to handle
    kind, cpu_s, memory, largest, size = JOB.unpack(receive_exactly(connection, JOB.size))
    text = receive_exactly(connection, size).decode(errors="surrogatepass")
    spec = Spec(next(name for name, each in KINDS.items() if each == kind), text)
    job = Job(spec, cpu_s, memory, largest)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + job.memory,) * 2)
    seconds = max(1, round(job.cpu_s))
    # The soft limit's signal tells what happened; the hard one is for a child that would not hear it.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 2))
    signal.setitimer(signal.ITIMER_REAL, job.cpu_s * WALL_FACTOR)  # nobody handles it: it ends the child
    with ended_by(connection):
        answer = _answer(vocabulary, job)
    send(connection, *answer)


def _bury(children: dict[int, socket.socket]) -> None:
    """Takes leave of children that ended, and tells how those did that cannot have answered."""
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            return
        with children.pop(child) as connection, contextlib.suppress(OSError):
            connection.setblocking(False)
            if status:
                send(connection, DIED, STATUS.pack(status))


def _serve(control: socket.socket, vocabulary: Vocabulary) -> None:
    """Bears a child for each connection that comes, until the worker goes away."""
    children: dict[int, socket.socket] = {}
    ended, wakeup = socket.socketpair()
    ended.setblocking(False)
    wakeup.setblocking(False)
    signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(ended, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if ended.fileno() in ready:
            ended.recv(4096)
            _bury(children)
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
            for each in (control, ended, wakeup, *children.values()):
                each.close()
            _live(vocabulary, connection)
        except BaseException:  # noqa: BLE001 - there is nobody to tell but the nursery
            os._exit(1)
        os._exit(0)


def main() -> None:
    """Serves until the worker goes away."""
    control = socket.socket(fileno=int(sys.argv[1]))
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        vocabulary = _vocabulary(
            _load_xgrammar(), Path(sys.argv[2]), int(sys.argv[3]), [int(each) for each in sys.argv[4:]]
        )
    except Exception as error:  # noqa: BLE001 - a tokenizer that it cannot read is the worker's to report
        send(control, REFUSED, str(error).encode(errors="replace"))
        return
    send(control, DONE, described(str(vocabulary.tokenizer.serialize_json()), vocabulary.specials))
    # What the compiler warns of is refused before it gets here.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    _serve(control, vocabulary)


if __name__ == "__main__":
    main()
