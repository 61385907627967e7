"""The process in which grammars are compiled: it waits, and forks a child for each of them.

xgrammar cannot be interrupted, and some grammars take it minutes or gigabytes. A child has limits of its own that the kernel keeps, and
whatever becomes of it (out of time, out of memory, a crash of the compiler) is one grammar's failure and nobody else's. What it compiles
is sent back serialized. Measured with SmolLM2's vocabulary: the nursery starts in 0.4 s and occupies 87 MB, a fork takes 8 ms, and
serializing and reading back costs half as much again as compiling.

Started by :class:`~worker_svc.grammars.compiler.GrammarCompiler` as ``python -m worker_svc.grammars.nursery FD FOLDER VOCAB EOS…``. Over
the socket ``FD`` it answers the tokenizer's description, or why it has none, and then receives one file descriptor per grammar.
"""

import contextlib
import fcntl
import os
import resource
import select
import signal
import socket
import struct
import sys
import types
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

HEADER: Final = struct.Struct("<cQ")
"""Of every answer: a kind, and the bytes that follow."""
JOB: Final = struct.Struct("<cdQQQ")
"""Of every job: the kind of its source, CPU seconds, bytes of memory, bytes of the result at most, bytes of text that follow."""
DONE: Final = b"+"
REFUSED: Final = b"-"

# Steps of a model on the same cores come first.
_NICENESS: Final = 10
# A child that has the cores to itself is done when its CPU time is; one that waits for them gets this much longer.
WALL_FACTOR: Final = 8.0


class Job(NamedTuple):
    """One grammar to compile."""

    source: bytes
    """``j``: JSON schema, ``r``: regex, ``e``: EBNF, ``t``: structural tag."""
    cpu_s: float
    memory: int
    """Bytes beside what the nursery has."""
    largest: int
    """Bytes that the compiled grammar may occupy."""
    text: str


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


def _tokenizer(core: Any, folder: Path, vocab_size: int, end_ids: list[int]) -> Any:
    """The vocabulary as xgrammar wants it; ids beyond the tokenizer's own have no text and are never allowed."""
    import json

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = [""] * vocab_size
    # Nor have special tokens: they are no part of the text that clients read.
    special = {token_id for token_id, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    for word, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size and token_id not in special:
            words[token_id] = word
    kind = json.loads(core.TokenizerInfo._detect_metadata_from_hf(tokenizer.to_str()))  # noqa: SLF001 - its only reader of them
    return core.TokenizerInfo(words, kind["vocab_type"], vocab_size, end_ids, kind["add_prefix_space"])


def _compile(core: Any, tokenizer: Any, job: Job) -> bytes:
    compiler = core.GrammarCompiler(tokenizer, 1, False, -1)
    match job.source:
        case b"j":
            # Any order of whitespace up to so many characters (a model that writes nothing else would never end); strict.
            grammar = compiler.compile_json_schema(job.text, True, None, None, True, MAX_WHITESPACE, False)
        case b"r":
            grammar = compiler.compile_regex(job.text)
        case b"e":
            grammar = compiler.compile_grammar_from_strings(job.text, "root")
        case _:
            grammar = compiler.compile_structural_tag(job.text)
    size = grammar.memory_size_bytes()
    if size > job.largest:
        raise ValueError(f"its compiled form has {size >> 20} MiB; at most {job.largest >> 20} MiB are kept")
    return str(grammar.serialize_json()).encode()


MAX_WHITESPACE: Final = 8
"""Characters of white space in a row that JSON may have between its parts."""


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


def _bear(core: Any, tokenizer: Any, connection: socket.socket) -> None:
    """A child's whole life."""
    os.setsid()  # a terminal's Ctrl-C is for the worker to handle
    source, cpu_s, memory, largest, size = JOB.unpack(receive_exactly(connection, JOB.size))
    text = receive_exactly(connection, size).decode(errors="surrogatepass")
    job = Job(source, cpu_s, memory, largest, text)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + job.memory,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (max(1, round(job.cpu_s)),) * 2)
    signal.setitimer(signal.ITIMER_REAL, job.cpu_s * WALL_FACTOR)  # nobody handles it: it ends the child
    try:
        with ended_by(connection):
            compiled = _compile(core, tokenizer, job)
        send(connection, DONE, compiled)
    except MemoryError:
        send(connection, REFUSED, b"std::bad_alloc")
    except Exception as error:  # noqa: BLE001 - whatever the compiler says is the answer
        send(connection, REFUSED, str(error).encode(errors="replace"))


def main() -> None:
    """Serves until the worker goes away."""
    control = socket.socket(fileno=int(sys.argv[1]))
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        core = _load_xgrammar()
        tokenizer = _tokenizer(
            core, Path(sys.argv[2]), int(sys.argv[3]), [int(each) for each in sys.argv[4:]]
        )
    except Exception as error:  # noqa: BLE001 - a tokenizer that it cannot read is the worker's to report
        send(control, REFUSED, str(error).encode(errors="replace"))
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    send(control, DONE, str(tokenizer.serialize_json()).encode())
    # What the compiler warns of is refused before it gets here.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        if os.fork() == 0:
            with contextlib.suppress(BaseException), socket.socket(fileno=descriptors[0]) as connection:
                control.close()
                _bear(core, tokenizer, connection)
            os._exit(0)
        os.close(descriptors[0])


if __name__ == "__main__":
    main()
