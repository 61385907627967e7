"""LoRA adapters across replicas: loaded for clients and for waiting requests, unloaded, listed."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from protos.errors import InvalidArgument, NotFound, Overloaded, TriptychError, Unavailable, Unsupported
from protos.service.logs import get_logger
from scheduler_svc.adapters.registry import Adapter, AdapterRegistry, LoadedAdapter
from scheduler_svc.engine.placement import AttachedReplica
from scheduler_svc.requests.request import Request, RequestState

Outcome = Callable[[Adapter | TriptychError], None]
"""Receives a new adapter or the error of its load. Must not call back into the engine."""


@dataclass(slots=True)
class _Introduction:
    """The first load of a new adapter, on several replicas."""

    adapter: Adapter
    done: Outcome
    pending: set[str]
    """Replicas without an answer yet."""
    answers: list[LoadedAdapter | TriptychError] = field(default_factory=list)


class AdapterControl:
    """The adapters of a deployment and their loads on its replicas.

    A new adapter is loaded on every ready replica with room and gets its name after all answers. A single
    refusal unloads it everywhere. Later loads serve waiting requests. Each replica's
    :class:`scheduler_svc.adapters.seats.AdapterSeats` tracks its adapters.
    """

    def __init__(
        self, replicas: Mapping[str, AttachedReplica], waiting: Iterable[Request], expected: Collection[str], *,
        clock: Callable[[], float], fail: Callable[[Request, TriptychError], None], released: Callable[[], None],
        dispatch: Callable[[], None],
    ) -> None:  # fmt: skip
        """Starts without adapters.

        Args:
            replicas: ready replicas by id.
            waiting: requests on no replica.
            expected: names of adapters in the settings; requests for them are told to retry.
            clock: monotonic seconds.
            fail: ends a request without a slot.
            released: tells the engine that waiting requests may find room.
            dispatch: places waiting requests.
        """
        self._replicas = replicas
        self._waiting = waiting
        self._clock = clock
        self._fail = fail
        self._released = released
        self._dispatch = dispatch
        self._introductions: dict[int, _Introduction] = {}
        self._users: Counter[int] = Counter()  # live requests by adapter
        # Starts at the clock: workers may still hold adapters under the ids of an earlier scheduler.
        self._load_ids = itertools.count(time.time_ns() // 1000)
        self._log = get_logger()
        self.registry = AdapterRegistry(expected)
        """Adapters by name."""

    @property
    def _hosts(self) -> Iterator[AttachedReplica]:
        """The replicas with LoRA."""
        return (replica for replica in self._replicas.values() if replica.scheduler.adapters.max_used)

    @property
    def max_loras(self) -> int:
        """Most adapters in one step of any replica; 0 without LoRA."""
        return max((replica.scheduler.adapters.max_used for replica in self._hosts), default=0)

    @property
    def smallest_host(self) -> int:
        """Adapters that fit on the host of every replica with LoRA; 0 without LoRA."""
        return min((replica.scheduler.adapters.max_held for replica in self._hosts), default=0)

    # ---- clients ----

    def resolve(self, name: str, digest: str = "") -> Adapter | None:
        """Returns the adapter of a request; None for the base model, whose name is empty.

        Args:
            name: the adapter's name.
            digest: the digest under which the answer began; empty for a new request.

        Raises:
            Unavailable: the adapter is not loaded yet, or no ready replica runs LoRA.
            NotFound: the name is unknown or was refused, or the digest differs.
        """
        adapter = self.registry.resolve(name, digest) if name else None
        if adapter is not None and self._replicas and not self.max_loras:
            raise Unavailable("no worker that is ready runs LoRA adapters; retry", retry_after_ms=5000)
        return adapter

    def check_size(self, adapter: Adapter, num_tokens: int) -> None:
        """Checks the length of a new request against the replicas allowed to load its adapter.

        Raises:
            Unavailable: the request fits none of them.
        """
        if self._replicas and not any(
            replica.scheduler.kv and replica.scheduler.kv.fits(num_tokens)
            for replica in self._hosts
            if replica.scheduler.adapters.may_load(adapter)
        ):
            raise Unavailable(
                f"no worker that is ready holds a request of {num_tokens} tokens and can load the adapter"
                f" {adapter.name!r}; ask for less, or retry when other workers are there",
                retry_after_ms=5000,
            )

    def load(self, name: str, source: str, *, in_place: bool, done: Outcome, expected: bool = False) -> None:
        """Starts loading a new adapter on the ready replicas.

        Args:
            name: the name for requests.
            source: a folder or hub id, readable by the workers.
            in_place: replaces an adapter of the same name, whose requests run on undisturbed.
            done: called once.
            expected: the adapter is from the settings.

        Raises:
            InvalidArgument: the name is taken.
            Unavailable: the name is reserved for an adapter of the settings.
            Unsupported: no replica runs LoRA.
            Overloaded: every replica needs all adapters on its host.
        """
        if not self.max_loras:
            raise Unsupported(
                "the workers run no LoRA adapters; start them with --enable-lora (pooling models take none)"
            )
        adapter = self.registry.make(name, source, in_place=in_place, expected=expected)
        if any(one.adapter.name == name for one in self._introductions.values()):
            raise InvalidArgument(f"an adapter {name!r} is being loaded; wait for it", param="name")
        hosts = [replica for replica in self._hosts if replica.scheduler.adapters.may_need_more]
        if not hosts:
            raise Overloaded(
                "requests use every adapter that the workers can hold; retry later, or raise --max-cpu-loras",
                retry_after_ms=5000,
            )
        pending = {replica.replica_id for replica in hosts}
        self._introductions[adapter.adapter_id] = _Introduction(adapter, done, pending)
        for replica in hosts:
            self._load(replica, adapter)

    def unload(self, name: str) -> None:
        """Frees a name; the adapter leaves the workers after its last request.

        Raises:
            NotFound: no adapter has the name.
        """
        adapter = self.registry.remove(name)
        self._log.info("adapter_unloaded", name=name, source=adapter.source)
        self._free_unused(adapter)
        self._released()
        self._dispatch()

    def holders(self, adapter: Adapter) -> list[str]:
        """Returns the ids of the replicas with the adapter on their host."""
        return [name for name, one in self._replicas.items() if one.scheduler.adapters.holds(adapter)]

    # ---- requests ----

    def add_user(self, request: Request) -> None:
        """Counts a new live request as a user of its adapter, if any."""
        if request.adapter is not None:
            self._users[request.adapter.adapter_id] += 1

    def remove_user(self, request: Request) -> None:
        """Ends the use of an adapter by a finished request."""
        if (adapter := request.adapter) is None:
            return
        self._users[adapter.adapter_id] -= 1
        if self._users[adapter.adapter_id]:
            return
        del self._users[adapter.adapter_id]
        self._free_unused(adapter)
        self.placed(request)
        self._released()

    def placed(self, request: Request) -> None:
        """Allows replicas to evict the adapter of a request that no longer waits."""
        if request.adapter is not None:
            for replica in self._hosts:
                replica.scheduler.adapters.awaited.discard(request.adapter.adapter_id)

    def want(self, request: Request, *, stuck: bool = False) -> None:
        """Loads the adapter of a waiting request, if useful and if a replica has room for it.

        Args:
            request: a request without a slot.
            stuck: the request is next in order and found no room. Its adapter is then loaded on another
                replica with a free slot, or claims a seat if every host is full.
        """
        adapter = request.adapter
        if adapter is None:
            return
        seats = [replica.scheduler.adapters for replica in self._hosts]
        held = any(each.holds(adapter) for each in seats)
        if request.trace is not None and not held and request.state is RequestState.WAITING:
            request.trace.waits("adapter", self._clock())
        if any(adapter.adapter_id in each.loading for each in seats) or (held and not stuck):
            return
        hosts = self._usable(request, adapter)
        if held:
            hosts = [
                one
                for one in hosts
                if one.scheduler.has_free_slot and not one.scheduler.adapters.holds(adapter)
            ]
        chosen = next((one for one in hosts if one.scheduler.adapters.may_need_more), None)
        if chosen is not None:
            self._load(chosen, adapter)
        elif stuck and hosts and not held:
            hosts[0].scheduler.adapters.claim(adapter.adapter_id, request.rank)

    def _usable(self, request: Request, adapter: Adapter) -> list[AttachedReplica]:
        """Returns the replicas allowed to load a request's adapter, the best first."""
        able = [
            one
            for one in self._hosts
            if one.scheduler.fits(request) and one.scheduler.adapters.may_load(adapter)
        ]
        rested = [one for one in able if not one.scheduler.adapters.is_paused(adapter)]

        def order(replica: AttachedReplica) -> tuple[bool, bool, int]:
            scheduler = replica.scheduler
            full = len(scheduler.adapters.held) >= scheduler.adapters.max_held
            return not scheduler.has_free_slot, full, scheduler.num_running

        return sorted(rested or able, key=order)

    def _load(self, replica: AttachedReplica, adapter: Adapter) -> None:
        seats, load_id = replica.scheduler.adapters, next(self._load_ids)
        seats.loading[adapter.adapter_id] = load_id
        answered = partial(self._answered, replica, adapter, load_id)
        replica.load_adapter(adapter, load_id, lambda: seats.needed, answered)

    # ---- workers ----

    def attached(self, replica: AttachedReplica) -> None:
        """Loads the registered adapters on a new replica, up to its host's limit."""
        for adapter in itertools.islice(self.registry, replica.scheduler.adapters.max_held):
            self._load(replica, adapter)

    def _answered(
        self, replica: AttachedReplica, adapter: Adapter, load_id: int, result: LoadedAdapter | TriptychError
    ) -> None:
        adapter_id, seats = adapter.adapter_id, replica.scheduler.adapters
        is_lost = self._replicas.get(replica.replica_id) is not replica
        if is_lost or seats.loading.get(adapter_id) != load_id:
            return  # the adapter was unloaded meanwhile
        if isinstance(result, LoadedAdapter) and adapter.digest not in ("", result.digest):
            replica.unload_adapter(load_id)
            result = NotFound(
                f"the files in {adapter.source!r} have changed; load the adapter again with load_inplace"
            )
        if isinstance(result, LoadedAdapter):
            seats.loaded(adapter_id, result.displaced, awaited=adapter_id in self._users)
            for request in self._waiting_for(adapter_id):
                if request.trace is not None and request.state is RequestState.WAITING:
                    request.trace.waits("queue", self._clock())
        else:
            self._log.warning(
                "adapter_not_loaded", replica=replica.replica_id, name=adapter.name, reason=result.message
            )
            seats.failed(adapter_id, result)
            self._fail_waiting(adapter, result)
        if (introduction := self._introductions.get(adapter_id)) is not None:
            introduction.answers.append(result)
            self._conclude(introduction, replica.replica_id)
        self._released()
        self._dispatch()

    def _fail_waiting(self, adapter: Adapter, error: TriptychError) -> None:
        """Fails requests whose adapter failed to load on every replica large enough for them.

        Once all replicas have failed, the next request retries them all.
        """
        adapter_id, hosts = adapter.adapter_id, list(self._hosts)
        failures = [replica.scheduler.adapters.failure(adapter_id) for replica in hosts]
        reason = next((one for one in failures if one is not None and one.retryable), error)
        for request in self._waiting_for(adapter_id):
            fitting = [replica for replica in hosts if replica.scheduler.fits(request)]
            if fitting and all(replica.scheduler.adapters.failure(adapter_id) for replica in fitting):
                self._fail(request, _failure(adapter, reason))
        if all(failures):
            for replica in hosts:
                replica.scheduler.adapters.failures.pop(adapter_id, None)

    def _waiting_for(self, adapter_id: int) -> list[Request]:
        return [one for one in self._waiting if one.adapter and one.adapter.adapter_id == adapter_id]

    def detached(self, replica_id: str) -> None:
        """Expects no more answers from a lost replica."""
        for introduction in list(self._introductions.values()):
            if replica_id in introduction.pending:
                self._conclude(introduction, replica_id)

    def _conclude(self, introduction: _Introduction, replica_id: str) -> None:
        """After the last answer, names a new adapter or unloads it everywhere."""
        introduction.pending.discard(replica_id)
        if introduction.pending:
            return
        adapter = introduction.adapter
        del self._introductions[adapter.adapter_id]
        facts = _agreed(adapter, introduction.answers)
        if isinstance(facts, TriptychError):
            self._free_unused(adapter)
            introduction.done(facts)
            return
        complete, earlier = self.registry.add(adapter, facts)
        if earlier is not None:
            self._free_unused(earlier)
        self._log.info(
            "adapter_loaded", name=adapter.name, source=adapter.source, rank=complete.rank,
            digest=complete.digest, revision=complete.revision,
        )  # fmt: skip
        introduction.done(complete)

    def _free_unused(self, adapter: Adapter) -> None:
        """Unloads an adapter from all replicas if no request uses it and none can name it."""
        adapter_id = adapter.adapter_id
        if adapter_id in self._users or any(one.adapter_id == adapter_id for one in self.registry):
            return
        for replica in self._hosts:
            seats = replica.scheduler.adapters
            load_id = seats.loading.pop(adapter_id, None) or seats.held.get(adapter_id)
            seats.lost(adapter_id, load_id)
            seats.failures.pop(adapter_id, None)
            if load_id is not None:
                replica.unload_adapter(load_id)


def _agreed(
    adapter: Adapter, answers: Sequence[LoadedAdapter | TriptychError]
) -> LoadedAdapter | TriptychError:
    """Returns the facts about a new adapter, or the error most useful to the client."""
    for kind in (InvalidArgument, NotFound, TriptychError):
        for answer in answers:
            if isinstance(answer, kind):
                return answer
    facts = [answer for answer in answers if isinstance(answer, LoadedAdapter)]
    if not facts:
        return Unavailable("the workers that loaded the adapter were lost; retry", retry_after_ms=2000)
    if len({each.digest for each in facts}) > 1:
        return InvalidArgument(
            f"the workers found different files in {adapter.source!r}; give all of them the same",
            param="source",
        )
    return facts[0]


def _failure(adapter: Adapter, reason: TriptychError) -> TriptychError:
    """Returns the error of a request whose adapter no worker could load."""
    message = f"no worker could load the adapter {adapter.name!r}: {reason.message}"
    if reason.retryable:
        return type(reason)(message, retry_after_ms=reason.retry_after_ms or 5000)
    return type(reason)(message, param="model")
