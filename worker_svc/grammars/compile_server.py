"""A process that writes constraints as grammars of llguidance in turn, under limits enforced by the kernel.

Python's lock would delay the steps of a worker doing this itself. A timer of CPU time ends the process;
allocations beyond the memory limit fail; a crash ends it. Each fails its grammar alone, and `compiler`
starts another process. The grammar is also compiled here once, so that the worker compiles none that
exceeds the limits.

`python -m worker_svc.grammars.compile_server FD FOLDER VOCAB EOS…` talks over the socket `FD`. Requests and
answers are JSON.
"""

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from protos.errors import InvalidArgument
from worker_svc.grammars.limits import memory_limit, too_much
from worker_svc.grammars.spec import Spec, lower
from worker_svc.grammars.tags import TokenNames

# Model steps on the same cores have priority.
_NICENESS: Final = 10
# A process whose memory has grown by this many bytes ends: allocators keep most of it.
_GROWTH: Final = 64 << 20
# The stack that glibc gives a thread of a process without a limit.
_DEFAULT_STACK: Final = 2 << 20


class _Bytes:
    """A vocabulary of single bytes in the form that llguidance reads, which is made in a moment."""

    bos_token_id = None
    eos_token_id = 0
    special_token_ids: Final[list[int]] = []

    def __init__(self, size: int) -> None:
        self.tokens = [bytes([index]) if index < 256 else b"" for index in range(size)]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _memory() -> tuple[int, int]:
    """Returns the bytes of this process's address space, and those in memory."""
    total, resident = Path("/proc/self/statm").read_text().split()[:2]
    return int(total) * resource.getpagesize(), int(resident) * resource.getpagesize()


@contextlib.contextmanager
def _limited(cpu_s: float, num_bytes: int) -> Iterator[None]:
    """Limits CPU time and memory within the context. SIGPROF ends the process."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_memory()[0] + num_bytes, most))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _limit_stack() -> None:
    """Leaves less stack than the worker's threads have, which compile the same grammar again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    threads = _DEFAULT_STACK if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_STACK, (threads * 3 // 4, hard))


def _answer(
    tokens: TokenNames, stand_in: LLTokenizer, spec: Spec, cpu_s: float, num_bytes: int
) -> dict[str, Any]:
    try:
        with _limited(cpu_s, num_bytes):
            grammar = lower(spec, tokens)
            matcher = LLMatcher(stand_in, LLMatcher.grammar_from_lark(grammar), log_level=0)
    except InvalidArgument as error:
        return {"refused": error.message}
    except (MemoryError, RecursionError):
        return {"refused": too_much(spec.kind, memory_limit(num_bytes))}
    if matcher.is_error():
        line = matcher.get_error().partition("\n")[0][:300]
        return {"refused": f"the {spec.kind} cannot be compiled: {line}"}
    return {"grammar": grammar}


def main() -> None:
    """Answers requests until the worker closes the socket."""
    connection = Connection(int(sys.argv[1]))
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    size, end_ids = int(sys.argv[3]), [int(each) for each in sys.argv[4:]]
    file = Path(sys.argv[2]) / "tokenizer.json"
    tokens = TokenNames(lambda: Tokenizer.from_file(str(file)), size, end_ids)
    stand_in = LLTokenizer(TokenizerWrapper(_Bytes(size)), eos_token=end_ids)
    most = _memory()[1] + _GROWTH
    _limit_stack()
    with contextlib.suppress(EOFError, OSError):
        connection.send_bytes(b"ready")
        while True:
            kind, text, cpu_s, num_bytes = json.loads(connection.recv_bytes())
            answer = _answer(tokens, stand_in, Spec(kind, text), cpu_s, num_bytes)
            answer["is_last"] = _memory()[1] > most
            connection.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
