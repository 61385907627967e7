"""Compiles grammars, at most a few at a time, and keeps them."""

import asyncio
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from protos.errors import Internal, InvalidArgument, Overloaded
from protos.logs import get_logger
from worker_svc.grammars.compile_client import Compilation, Nursery, Vocabulary
from worker_svc.grammars.lowering.limits import CompilerLimits
from worker_svc.grammars.spec import Spec, check_size

if TYPE_CHECKING:
    import xgrammar

# Grammars that are known to be refused; a message each.
_MAX_REFUSALS: Final = 1024
_MAX_WAITING: Final = 1024
_TOKENIZER_FILE: Final = "tokenizer.json"


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
        self._alive: weakref.WeakValueDictionary[bytes, xgrammar.CompiledGrammar] = (
            weakref.WeakValueDictionary()
        )
        """The kept ones, and those that only a matcher still has."""
        self._counting = threading.RLock()
        self._bytes = 0
        self._refusals: OrderedDict[bytes, InvalidArgument] = OrderedDict()
        self._under_way: dict[bytes, Compilation] = {}
        self._nursery: Nursery | None = None
        self._starting = threading.Lock()
        self._reading = threading.Lock()
        self._closed = False
        self.num_compiled = 0

    @property
    def cached_bytes(self) -> int:
        """What the grammars occupy, those that only running requests need among them."""
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
        try:
            check_size(spec)
        except InvalidArgument as error:
            return _failed(error)
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
            compilation = Compilation()
            compilation.future = self._pool.submit(self._compile, spec, compilation)
            self._under_way[spec.key] = compilation
        compilation.future.add_done_callback(lambda _: self._forget(spec.key, compilation))
        return compilation.future

    def find(self, spec: Spec) -> "xgrammar.CompiledGrammar | None":
        """A grammar that was compiled and is still kept."""
        with self._lock:
            return self._get(spec.key)

    def refuse(self, spec: Spec, refusal: InvalidArgument) -> None:
        """Forgets a grammar, and remembers why it is not compiled again."""
        with self._lock:
            self._compiled.pop(spec.key, None)
            self._alive.pop(spec.key, None)
            self._refusals[spec.key] = refusal
            if len(self._refusals) > _MAX_REFUSALS:
                self._refusals.popitem(last=False)

    def close(self) -> None:
        """Ends the process; compilations under way fail."""
        with self._starting:
            self._closed = True
            if self._nursery is not None:
                self._nursery.close()
                self._nursery = None
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _get(self, key: bytes) -> "xgrammar.CompiledGrammar | None":
        found = self._alive.get(key)
        if found is not None:
            self._compiled[key] = found
            self._compiled.move_to_end(key)
        return found

    def _count(self, size: int) -> None:
        """May be called wherever the last use of a grammar ends."""
        with self._counting:
            self._bytes += size

    def _end_of_use(self, size: int, vocabulary: Vocabulary) -> None:  # noqa: ARG002 - it lived until here
        self._count(-size)

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

    def _forget(self, key: bytes, compilation: Compilation) -> None:
        with self._lock:
            if self._under_way.get(key) is compilation:
                del self._under_way[key]

    def _compile(self, spec: Spec, compilation: Compilation) -> int:
        """On a thread of the pool."""
        import xgrammar

        started = time.monotonic()
        try:
            nursery = self._ready()
            markers, serialized = nursery.compile(spec, self.limits, compilation)
        except InvalidArgument as error:
            self.refuse(spec, error)
            raise
        with self._reading:
            vocabulary = nursery.vocabulary(markers)
            grammar = xgrammar.CompiledGrammar.deserialize_json(serialized, vocabulary.info)
            if vocabulary.is_new:
                vocabulary.is_new = False
                self._count(vocabulary.num_bytes)
                weakref.finalize(vocabulary, self._count, -vocabulary.num_bytes).atexit = False
        size = int(grammar.memory_size_bytes)
        get_logger().info(
            "grammar_compiled", kind=spec.kind, bytes=size, seconds=round(time.monotonic() - started, 3)
        )
        with self._lock:
            self.num_compiled += 1
            self._compiled[spec.key] = self._alive[spec.key] = grammar
            self._count(size)
            weakref.finalize(grammar, self._end_of_use, size, vocabulary).atexit = False
            while len(self._compiled) > 1 and self.cached_bytes > self.limits.cache:
                self._compiled.popitem(last=False)
        return size

    def _ready(self) -> Nursery:
        with self._starting:
            if self._closed:
                raise Internal("the worker is ending")
            if self._nursery is not None and not self._nursery.is_alive:
                self._nursery.close()
                self._nursery = None
            if self._nursery is None:
                self._nursery = Nursery(self._folder, self._vocab_size, self._end_ids)
            return self._nursery


def _done(size: int) -> "Future[int]":
    future: Future[int] = Future()
    future.set_result(int(size))
    return future


def _failed(error: Exception) -> "Future[int]":
    future: Future[int] = Future()
    future.set_exception(error)
    return future
