"""LoRA adapters as clients and workers see them: load, unload, list, and the workers' answers."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from protos.errors import (
    InvalidArgument,
    NotFound,
    Overloaded,
    TriptychError,
    Unavailable,
    Unsupported,
)
from protos.service.logs import get_logger
from scheduler_svc.adapters.registry import Adapter, AdapterRegistry, LoadedAdapter
from scheduler_svc.dispatch.queueing import Queues
from scheduler_svc.requests.request import Request

Outcome = Callable[[Adapter | TriptychError], None]
"""Receives a new adapter, or why it was refused. Must not call back into the engine."""


@dataclass(slots=True)
class _Introduction:
    """A new adapter that replicas are asked to load."""

    adapter: Adapter
    done: Outcome
    asked: set[str]
    """Replicas that have not answered."""
    facts: list[LoadedAdapter] = field(default_factory=list)
    refusals: list[TriptychError] = field(default_factory=list)


class AdapterControl:
    """The adapters of a deployment.

    A new adapter is loaded on every ready replica that has room, and gets its name when all have answered. A
    single refusal takes it off all of them. Later loads, for requests, need no name.
    """

    def __init__(
        self, queues: Queues, expected: Collection[str], *, fail: Callable[[Request, TriptychError], None], released: Callable[[], None],
        dispatch: Callable[[], None],
    ) -> None:  # fmt: skip
        """Starts without adapters.

        Args:
            expected: names of adapters that are going to be loaded; requests for them are told to retry.
            queues: have the requests that wait for adapters, and the replicas' hosts.
            fail: ends a request that has no slot.
            released: notes that waiting requests may find room.
            dispatch: gives waiting requests to replicas.
        """
        self._queues = queues
        self._queue = queues.adapters
        self._fail = fail
        self._released = released
        self._dispatch = dispatch
        self._introductions: dict[int, _Introduction] = {}
        self._log = get_logger()
        self.registry = AdapterRegistry(expected)
        """Adapters by name."""

    def refuse(self, name: str, error: TriptychError, *, for_good: bool) -> None:
        """Remembers why an adapter of the settings cannot be served; frees its name if that is `for_good`."""
        self.registry.refuse(name, error, for_good=for_good)

    def resolve(self, name: str, digest: str = "") -> Adapter | None:
        """Returns the adapter that a request names; None for the base model, whose name is empty.

        Args:
            name: the adapter's name.
            digest: of the weights with which the request's answer began; empty if it begins now.

        Raises:
            Unavailable: it is going to be loaded.
            NotFound: there is no such adapter, it was refused, or it has other weights than the answer.
        """
        return self.registry.resolve(name, digest) if name else None

    def check_size(self, adapter: Adapter, num_tokens: int) -> None:
        """Checks that a new request is not too large for all replicas that may run its adapter.

        Raises:
            Unavailable: it is; another replica may come.
        """
        if not self._queue.could_load(adapter, num_tokens):
            raise Unavailable(
                f"no worker that is ready holds a request of {num_tokens} tokens and can load the adapter"
                f" {adapter.name!r}; ask for less, or retry when other workers are there",
                retry_after_ms=5000,
            )

    def load(self, name: str, source: str, *, in_place: bool, done: Outcome, expected: bool = False) -> None:
        """Starts loading a new adapter on the ready replicas.

        Args:
            name: the name that requests will use.
            source: a folder or hub id that the workers can read.
            in_place: whether it replaces an adapter of the same name. Requests of that one end undisturbed.
            done: called once.
            expected: whether it is an adapter of the settings.

        Raises:
            InvalidArgument: the name is taken.
            Unavailable: the name is kept for an adapter of the settings.
            Unsupported: no replica runs adapters.
            Overloaded: on every replica, requests use as many adapters as its host holds.
        """
        if not self._queue.max_loras:
            raise Unsupported(
                "the workers run no LoRA adapters; start them with --enable-lora (pooling models take none)"
            )
        adapter = self.registry.begin(name, source, in_place=in_place, expected=expected)
        asked = self._queue.introduce(adapter)
        if not asked:
            error = Overloaded(
                "requests use every adapter that the workers can hold; retry later, or raise --max-cpu-loras",
                retry_after_ms=5000,
            )
            self.registry.failed(adapter)
            raise error
        self._introductions[adapter.adapter_id] = _Introduction(adapter, done, set(asked))

    def unload(self, name: str) -> None:
        """Frees a name. The adapter's requests go on to their end; then it leaves the workers.

        Raises:
            NotFound: no adapter has the name.
        """
        adapter = self.registry.remove(name)
        self._log.info("adapter_unloaded", name=name, source=adapter.source)
        self._queue.retire(adapter.adapter_id)
        self._dispatch()

    def listed(self) -> list[tuple[Adapter, list[str]]]:
        """Returns the adapters that requests can name, each with the replicas that have it on their host."""
        return [(adapter, self._queue.holders(adapter.adapter_id)) for adapter in self.registry]

    @property
    def max_loras(self) -> int:
        """Adapter slots of the replica that has most; 0 if no replica runs adapters."""
        return self._queue.max_loras

    @property
    def smallest_host(self) -> int:
        """Adapters that every replica with adapters holds beside each other; 0 if there is none."""
        return self._queue.smallest_host

    # ---- answers of workers ----

    def answered(self, replica_id: str, adapter: Adapter, result: LoadedAdapter | TriptychError) -> None:
        """Takes a replica's answer to a call of :attr:`AdapterHost.load`."""
        adapter_id = adapter.adapter_id
        introduction = self._introductions.get(adapter_id)
        if introduction is None and isinstance(result, LoadedAdapter) and result.digest != adapter.digest:
            result = _changed(adapter)
            self._queue.discard(replica_id, adapter_id)
        if isinstance(result, LoadedAdapter):
            self._queues.wait(*self._queue.loaded(replica_id, adapter_id))
        else:
            self._log.warning(
                "adapter_not_loaded", replica=replica_id, name=adapter.name, reason=result.message
            )
            requests, reason = self._queue.refused(replica_id, adapter_id, result)
            for request in [*requests, *self._queues.without_host(adapter_id)]:
                self._fail(request, _failure(adapter, reason))
        if introduction is not None and replica_id in introduction.asked:
            introduction.asked.discard(replica_id)
            if isinstance(result, LoadedAdapter):
                introduction.facts.append(result)
            else:
                introduction.refusals.append(result)
            self._conclude(introduction)
        self._released()
        self._dispatch()

    def detached(self, replica_id: str) -> None:
        """Forgets the adapters of a lost replica, and expects no more answers of it."""
        self._queue.detach(replica_id)
        for introduction in list(self._introductions.values()):
            if replica_id in introduction.asked:
                introduction.asked.discard(replica_id)
                self._conclude(introduction)

    def _conclude(self, introduction: _Introduction) -> None:
        """Gives a new adapter its name once every replica has answered, or takes it off all of them."""
        if introduction.asked:
            return
        adapter = introduction.adapter
        del self._introductions[adapter.adapter_id]
        error = _refusal(adapter, introduction)
        if error is not None:
            self.registry.failed(adapter)
            self._queue.retire(adapter.adapter_id)
            introduction.done(error)
            return
        complete, earlier = self.registry.loaded(adapter, introduction.facts[0])
        if earlier is not None:
            self._queue.retire(earlier.adapter_id)
        self._log.info(
            "adapter_loaded",
            name=adapter.name,
            source=adapter.source,
            rank=complete.rank,
            digest=complete.digest,
            revision=complete.revision,
        )
        introduction.done(complete)


def _refusal(adapter: Adapter, introduction: _Introduction) -> TriptychError | None:
    """Returns why an adapter that every replica has answered for cannot be served; None if it can."""
    # A client can do most about an error of the first two kinds.
    for kind in (InvalidArgument, NotFound, TriptychError):
        for refusal in introduction.refusals:
            if isinstance(refusal, kind):
                return refusal
    if not introduction.facts:
        return Unavailable("the workers that loaded the adapter were lost; retry", retry_after_ms=2000)
    if len({facts.digest for facts in introduction.facts}) > 1:
        return InvalidArgument(
            f"the workers found different files in {adapter.source!r}; give all of them the same",
            param="source",
        )
    return None


def _failure(adapter: Adapter, reason: TriptychError) -> TriptychError:
    """Returns the error of a request whose adapter no worker could load; its kind says whether to retry."""
    message = f"no worker could load the adapter {adapter.name!r}: {reason.message}"
    if reason.retryable:
        return type(reason)(message, retry_after_ms=reason.retry_after_ms or 5000)
    return type(reason)(message, param="model")


def _changed(adapter: Adapter) -> TriptychError:
    return NotFound(f"the files in {adapter.source!r} have changed; load the adapter again with load_inplace")
