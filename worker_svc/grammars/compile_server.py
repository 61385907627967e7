"""A process that compiles grammars in turn, under limits enforced by the kernel.

Schemas, expressions, choices and most structural tags are lowered to llguidance's grammars, which the
worker compiles in milliseconds. GBNF goes to xgrammar, which cannot be interrupted and may take minutes or
gigabytes. A timer of CPU time ends the process; allocations beyond the memory limit fail; a crash ends it.
Each fails its grammar alone, and `CompileClient` starts another process. Steps would wait for slow masks, so
xgrammar's grammars are walked through as output would.

`python -m worker_svc.grammars.compile_server FD FOLDER VOCAB EOS…` talks over the socket `FD`. A request is a
JSON list, or `null` for the vocabulary. An answer is a JSON object and the bytes of a grammar.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

from protos.errors import InvalidArgument
from worker_svc.grammars.refusals import refusal
from worker_svc.grammars.spec import Kind, Source, Spec, lower
from worker_svc.grammars.special_tokens import markers_in, resolve_token_names, with_marker_texts

# Model steps on the same cores have priority.
_NICENESS: Final = 10
# A process whose memory has grown by this many bytes ends: allocators keep most of it.
_GROWTH: Final = 64 << 20
# CPU seconds that one mask, and all masks of a walk, may take. The worker builds masks between two steps of
# the batch.
_MASK_S: Final = 0.25
_WALK_S: Final = 1.0
_WALK_TOKENS: Final = 32
# The walk takes the longest of this many random allowed tokens: whole words and separators, as models write
# them.
_WALK_CHOICES: Final = 12


@dataclass(frozen=True)
class Job:
    """A request to compile a grammar."""

    kind: Kind
    """Of the constraint."""
    text: str
    """Of the constraint, not lowered."""
    cpu_s: float
    """CPU seconds for it."""
    compile_bytes: int
    """Bytes allocated for it."""
    grammar_bytes: int
    """Bytes of the compiled grammar, serialized or not."""

    def dump(self) -> bytes:
        """Encodes the request."""
        return json.dumps(astuple(self)).encode()


class SerializedGrammar(NamedTuple):
    """A compiled grammar on its way to the worker."""

    source: Source
    """The engine's kind of grammar."""
    markers: tuple[int, ...]
    """Ids of its markers, if it is xgrammar's."""
    text: str
    """The grammar: xgrammar's own serialization, or llguidance's source."""


class CompilerVocabulary(NamedTuple):
    """The model's vocabulary as the children use it."""

    core: Any
    """xgrammar's compiled module."""
    tokenizer: Any
    """xgrammar's `TokenizerInfo`."""
    end_ids: list[int]
    """Tokens ending a sequence."""
    specials: dict[str, int]
    """Ids of special tokens not ending a sequence, by their text."""
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


def _compile(vocabulary: CompilerVocabulary, job: Job) -> SerializedGrammar:
    """Compiles a grammar, checks its cost and returns it serialized.

    Raises:
        InvalidArgument: our checks refuse the spec.
        Exception: xgrammar refuses it, or it is too large or too expensive to match.
    """
    core = vocabulary.core
    source, text = lower(Spec(job.kind, job.text), vocabulary.specials, vocabulary.end_ids, vocabulary.id_of)
    if source == "lark":
        return SerializedGrammar(source, (), text)
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
    return SerializedGrammar(source, tuple(sorted(markers.values())), serialized)


def compile_lowered(core: Any, compiler: Any, source: Source, text: str) -> Any:
    """Compiles a lowered spec.

    Args:
        core: xgrammar's compiled module.
        compiler: a compiler of that module.
        source: kind of `text`.
        text: the lowered text, from `spec.lower`.
    """
    match source:
        case "ebnf":
            return compiler.compile_grammar_from_strings(text, "root")
        case "tag":
            return compiler.compile_grammar_ebnf(core.Grammar.from_structural_tag(text))
        case "lark":
            raise AssertionError("xgrammar does not read Lark")


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


def _memory() -> tuple[int, int]:
    """Returns the bytes of this process's address space, and those in memory."""
    total, resident = Path("/proc/self/statm").read_text().split()[:2]
    return int(total) * resource.getpagesize(), int(resident) * resource.getpagesize()


@contextlib.contextmanager
def _limited(job: Job) -> Iterator[None]:
    """Limits CPU time and memory within the context. SIGPROF ends the process."""
    in_use, _ = _memory()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + job.compile_bytes, most))
    signal.setitimer(signal.ITIMER_PROF, job.cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _answer(vocabulary: CompilerVocabulary, job: Job) -> tuple[dict[str, Any], bytes]:
    """Compiles a job."""
    try:
        with _limited(job):
            made = _compile(vocabulary, job)
        return {"source": made.source, "markers": made.markers}, made.text.encode()
    except InvalidArgument as error:
        return {"refused": error.message}, b""
    except MemoryError:
        return {"failed": "std::bad_alloc"}, b""
    except Exception as error:  # noqa: BLE001 - the compiler's reason is the answer, whatever its type
        return {"failed": str(error) or type(error).__name__}, b""


def main() -> None:
    """Loads the vocabulary and answers requests until the worker closes the socket."""
    connection = Connection(int(sys.argv[1]))
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        vocabulary = _load_vocabulary(
            _load_xgrammar(), Path(sys.argv[2]), int(sys.argv[3]), [int(each) for each in sys.argv[4:]]
        )
    except Exception as error:  # noqa: BLE001 - the worker reports why the tokenizer cannot be read
        _send(connection, {"failed": str(error)})
        return
    # A library of xgrammar's has set a handler that prints a trace. It allocates memory, so a process that
    # crashes while it allocates some itself would hang instead of ending.
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    # xgrammar prints warnings about features that are refused before they reach it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    most = _memory()[1] + _GROWTH
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = json.loads(connection.recv_bytes())
            if request is None:
                tokenizer = str(vocabulary.tokenizer.serialize_json())
                _send(connection, {"specials": vocabulary.specials}, tokenizer.encode())
                continue
            answer, grammar = _answer(vocabulary, Job(*request))
            _send(connection, answer | {"is_last": _memory()[1] > most}, grammar)


def _send(connection: Connection, answer: dict[str, Any], grammar: bytes = b"") -> None:
    connection.send_bytes(json.dumps(answer).encode())
    connection.send_bytes(grammar)


if __name__ == "__main__":
    main()
