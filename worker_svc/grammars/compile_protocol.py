"""Messages between a worker and its grammar compile server.

After start-up the server answers once on the control socket: `DONE` with a vocabulary, or `COMPILER_ERROR`
with a reason. Then each grammar gets a socket pair. The worker sends one end to the server, which forks a
child for it. The worker sends the child a job and reads one answer.
"""

import json
import socket
import struct
from collections.abc import Mapping
from typing import Final, NamedTuple

from worker_svc.grammars.compiler_limits import CompilerLimits
from worker_svc.grammars.spec import Kind, Spec

WALL_FACTOR: Final = 8.0
"""Wall-clock time of a compilation as a multiple of its CPU limit: a child may have to wait for a core."""

DONE: Final = b"+"
"""A vocabulary; or a compiled grammar."""
INVALID_SPEC: Final = b"!"
"""Why our checks refuse the spec."""
COMPILER_ERROR: Final = b"-"
"""Why xgrammar cannot compile it."""
CHILD_DIED: Final = b"x"
"""The child ended without an answer; a wait status follows."""

_ANSWER: Final = struct.Struct("<cQ")
"""Header of an answer: its kind and the number of bytes that follow."""
_JOB: Final = struct.Struct("<cdQQQ")
"""Header of a job: kind of spec, CPU seconds, memory limit, result limit, length of the text."""
_STATUS: Final = struct.Struct("<i")
_KINDS: Final[dict[Kind, bytes]] = {
    "json_schema": b"j", "json_object": b"o", "regex": b"r", "grammar": b"g", "choice": b"c", "structural_tag": b"t",
}  # fmt: skip


class Job(NamedTuple):
    """One grammar to compile."""

    spec: Spec
    """The constraint, not lowered."""
    cpu_s: float
    """CPU seconds that the child may use."""
    compile_bytes: int
    """Bytes that the child may allocate beyond what the server has."""
    grammar_bytes: int
    """Bytes that the compiled grammar may occupy, serialized or not."""


class SerializedGrammar(NamedTuple):
    """A compiled grammar on its way to the worker."""

    markers: tuple[int, ...]
    """Ids of its markers."""
    text: str
    """xgrammar's own serialization."""


def send_job(connection: socket.socket, spec: Spec, limits: CompilerLimits) -> None:
    """Sends a grammar to a child."""
    payload = spec.text.encode(errors="surrogatepass")
    header = _JOB.pack(
        _KINDS[spec.kind],
        limits.cpu_s,
        limits.compile_bytes,
        limits.grammar_bytes,
        len(payload),
    )
    connection.sendall(header + payload)


def receive_job(connection: socket.socket) -> Job:
    """Receives the grammar to compile.

    Raises:
        EOFError: the worker hung up.
    """
    code, cpu_s, compile_bytes, grammar_bytes, size = _JOB.unpack(_receive_exactly(connection, _JOB.size))
    text = _receive_exactly(connection, size).decode(errors="surrogatepass")
    kind = next(kind for kind, each in _KINDS.items() if each == code)
    return Job(Spec(kind, text), cpu_s, compile_bytes, grammar_bytes)


def send_answer(connection: socket.socket, kind: bytes, payload: bytes) -> None:
    """Sends an answer."""
    connection.sendall(_ANSWER.pack(kind, len(payload)) + payload)


def receive_answer(connection: socket.socket) -> tuple[bytes, bytes]:
    """Receives an answer: its kind and its payload.

    Raises:
        EOFError: the other side ended before the answer was complete.
    """
    kind, size = _ANSWER.unpack(_receive_exactly(connection, _ANSWER.size))
    return kind, _receive_exactly(connection, size)


def dump_status(status: int) -> bytes:
    """Encodes the wait status of a child."""
    return _STATUS.pack(status)


def load_status(payload: bytes) -> int:
    """Decodes what `dump_status` encoded."""
    return int(_STATUS.unpack(payload)[0])


def dump_vocabulary(tokenizer: str, specials: Mapping[str, int]) -> bytes:
    """Encodes a vocabulary: xgrammar's own serialization, and the special tokens that it leaves out."""
    return json.dumps({"tokenizer": tokenizer, "specials": specials}).encode()


def load_vocabulary(payload: bytes) -> tuple[str, dict[str, int]]:
    """Decodes what `dump_vocabulary` encoded."""
    content = json.loads(payload)
    return content["tokenizer"], content["specials"]


def dump_grammar(grammar: SerializedGrammar) -> bytes:
    """Encodes a compiled grammar: its markers as a JSON list, a line feed and its text."""
    return json.dumps(grammar.markers).encode() + b"\n" + grammar.text.encode()


def load_grammar(payload: bytes) -> SerializedGrammar:
    """Decodes what `dump_grammar` encoded."""
    markers, _, text = payload.partition(b"\n")
    return SerializedGrammar(tuple(json.loads(markers)), text.decode())


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Reads `size` bytes.

    Raises:
        EOFError: the other side ended before.
    """
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = connection.recv_into(view[done:])
        if not count:
            raise EOFError
        done += count
    return bytes(data)
