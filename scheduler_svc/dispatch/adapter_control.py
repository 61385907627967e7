"""LoRA adapters as clients, waiting requests and workers see them: load, unload, list, and their answers."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from protos.errors import InvalidArgument, NotFound, Overloaded, TriptychError, Unavailable, Unsupported
from protos.service.logs import get_logger
from scheduler_svc.adapters.registry import Adapter, AdapterRegistry, LoadedAdapter
from scheduler_svc.dispatch.placement import AttachedReplica
from scheduler_svc.requests.request import Request, RequestState

Outcome = Callable[[Adapter | TriptychError], None]
"""Receives a new adapter, or why it was refused. Must not call back into the engine."""


@dataclass(slots=True)
class _Introduction:
    """A new adapter that replicas are asked to load."""

    adapter: Adapter
    done: Outcome
    answers: dict[str, LoadedAdapter | TriptychError | None] = field(default_factory=dict)
    """By replica; None as long as it has not answered."""


class AdapterControl:
    """The adapters of a deployment, and the replicas that load them.

    A new adapter is loaded on every ready replica that has room, and gets its name when all have answered. A
    single refusal takes it off all of them. Later loads are for waiting requests. What each replica has is in
    its :class:`scheduler_svc.adapters.seats.AdapterSeats`.
    """

    def __init__(
        self, replicas: Mapping[str, AttachedReplica], waiting: Iterable[Request], expected: Collection[str], *,
        clock: Callable[[], float], fail: Callable[[Request, TriptychError], None], released: Callable[[], None],
        dispatch: Callable[[], None],
    ) -> None:  # fmt: skip
        """Starts without adapters.

        Args:
            replicas: the ready replicas by id.
            waiting: the requests that no replica has.
            expected: names of adapters that are going to be loaded; requests for them are told to retry.
            clock: monotonic seconds.
            fail: ends a request that has no slot.
            released: notes that waiting requests may find room.
            dispatch: gives waiting requests to replicas.
        """
        self._replicas = replicas
        self._waiting = waiting
        self._clock = clock
        self._fail = fail
        self._released = released
        self._dispatch = dispatch
        self._introductions: dict[int, _Introduction] = {}
        # Live requests by adapter, and the adapters that no new request can name.
        self._users: Counter[int] = Counter()
        self._retired: set[int] = set()
        # No worker can have an adapter of an earlier scheduler under the same id.
        self._load_ids = itertools.count(time.time_ns() // 1000)
        self._log = get_logger()
        self.registry = AdapterRegistry(expected)
        """Adapters by name."""

    @property
    def _hosts(self) -> Iterator[AttachedReplica]:
        """The replicas that run adapters."""
        return (replica for replica in self._replicas.values() if replica.lora is not None)

    @property
    def max_loras(self) -> int:
        """Different adapters in a step of the replica that takes most; 0 if no replica runs adapters."""
        return max((replica.scheduler.adapters.max_used for replica in self._hosts), default=0)

    @property
    def smallest_host(self) -> int:
        """Adapters that every replica with adapters can hold at once; 0 if there is none."""
        return min((replica.scheduler.adapters.max_held for replica in self._hosts), default=0)

    # ---- clients ----

    def resolve(self, name: str, digest: str = "") -> Adapter | None:
        """Returns the adapter that a request names; None for the base model, whose name is empty.

        Args:
            name: the adapter's name.
            digest: of the weights with which the request's answer began; empty if it begins now.

        Raises:
            Unavailable: it is going to be loaded, or no replica runs adapters now.
            NotFound: there is no such adapter, it was refused, or it has other weights than the answer.
        """
        adapter = self.registry.resolve(name, digest) if name else None
        if adapter is not None and self._replicas and not self.max_loras:
            raise Unavailable("no worker that is ready runs LoRA adapters; retry", retry_after_ms=5000)
        return adapter

    def check_size(self, adapter: Adapter, num_tokens: int) -> None:
        """Checks that a new request is not too large for all replicas that may run its adapter.

        Raises:
            Unavailable: it is; another replica may come.
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
            name: the name that requests will use.
            source: a folder or hub id that the workers can read.
            in_place: whether it replaces an adapter of the same name. Requests of that one end undisturbed.
            done: called once.
            expected: whether it is an adapter of the settings.

        Raises:
            InvalidArgument: the name is taken.
            Unavailable: the name is kept for an adapter of the settings.
            Unsupported: no replica runs adapters.
            Overloaded: every replica needs all the adapters that it holds.
        """
        if not self.max_loras:
            raise Unsupported(
                "the workers run no LoRA adapters; start them with --enable-lora (pooling models take none)"
            )
        adapter = self.registry.begin(name, source, in_place=in_place, expected=expected)
        introduction = _Introduction(adapter, done)
        for replica_id, replica in self._replicas.items():
            if replica.scheduler.adapters.may_need_more:
                introduction.answers[replica_id] = None
                self._load(replica, adapter)
        if not introduction.answers:
            self.registry.failed(adapter)
            raise Overloaded(
                "requests use every adapter that the workers can hold; retry later, or raise --max-cpu-loras",
                retry_after_ms=5000,
            )
        self._introductions[adapter.adapter_id] = introduction

    def unload(self, name: str) -> None:
        """Frees a name. The adapter's requests go on to their end; then it leaves the workers.

        Raises:
            NotFound: no adapter has the name.
        """
        adapter = self.registry.remove(name)
        self._log.info("adapter_unloaded", name=name, source=adapter.source)
        self._retire(adapter.adapter_id)
        self._dispatch()

    def holders(self, adapter: Adapter) -> list[str]:
        """Returns the ids of the replicas that have an adapter on their host."""
        return [name for name, one in self._replicas.items() if one.scheduler.adapters.holds(adapter)]

    # ---- requests ----

    def add_user(self, request: Request) -> None:
        """Counts a new live request as a user of its adapter, if it has one."""
        if request.adapter is not None:
            self._users[request.adapter.adapter_id] += 1

    def remove_user(self, request: Request) -> None:
        """Ends the use of an adapter by a request that ended."""
        if request.adapter is None:
            return
        adapter_id = request.adapter.adapter_id
        self._users[adapter_id] -= 1
        if self._users[adapter_id]:
            return
        del self._users[adapter_id]
        if adapter_id in self._retired:
            self._free(adapter_id)
        self.placed(request)
        self._released()

    def placed(self, request: Request) -> None:
        """Lets replicas that do not use the adapter of a request forget it: the request waits no more."""
        if request.adapter is not None:
            for replica in self._hosts:
                replica.scheduler.adapters.unwanted(request.adapter.adapter_id)

    def want(self, request: Request, *, stuck: bool = False) -> None:
        """Has the adapter of a waiting request loaded, if that helps and a replica has room for it.

        Args:
            request: a request without a slot.
            stuck: whether it is next in order and found no room. Its adapter then comes to a second replica
                that has a free slot, or claims a seat if every host is full.
        """
        adapter = request.adapter
        if adapter is None:
            return
        adapter_id, hosts = adapter.adapter_id, list(self._hosts)
        held = any(adapter_id in replica.scheduler.adapters.held for replica in hosts)
        if request.trace is not None and not held and request.state is RequestState.WAITING:
            request.trace.waits("adapter", self._clock())
        if any(adapter_id in replica.scheduler.adapters.loading for replica in hosts) or (held and not stuck):
            return
        hosts = self._usable(request)
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
            hosts[0].scheduler.adapters.claim(adapter_id, request.rank)

    def _usable(self, request: Request) -> list[AttachedReplica]:
        """Returns the replicas that may load a request's adapter, the best first."""
        adapter = request.adapter
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
        assert replica.lora is not None
        seats, load_id = replica.scheduler.adapters, next(self._load_ids)
        seats.loading[adapter.adapter_id] = load_id
        replica.lora.load(adapter, load_id)

    # ---- workers ----

    def attached(self, replica: AttachedReplica) -> None:
        """Has a new replica load as many of the registered adapters as its host takes."""
        if replica.lora is not None:
            for adapter in itertools.islice(self.registry, replica.scheduler.adapters.max_held):
                self._load(replica, adapter)

    def answered(
        self, replica_id: str, adapter: Adapter, load_id: int, result: LoadedAdapter | TriptychError
    ) -> None:
        """Takes a replica's answer to a call of :attr:`AdapterLoads.load`."""
        adapter_id, replica = adapter.adapter_id, self._replicas.get(replica_id)
        if replica is None or replica.scheduler.adapters.loading.get(adapter_id) != load_id:
            return  # the replica was lost, or the adapter unloaded, meanwhile
        assert replica.lora is not None
        seats = replica.scheduler.adapters
        if isinstance(result, LoadedAdapter) and adapter.digest not in ("", result.digest):
            replica.lora.unload(load_id)
            result = NotFound(
                f"the files in {adapter.source!r} have changed; load the adapter again with load_inplace"
            )
        if isinstance(result, LoadedAdapter):
            seats.loaded(adapter_id, result.displaced, awaited=adapter_id in self._users)
            for request in self._of(adapter_id):
                if request.trace is not None and request.state is RequestState.WAITING:
                    request.trace.waits("queue", self._clock())
        else:
            self._log.warning(
                "adapter_not_loaded", replica=replica_id, name=adapter.name, reason=result.message
            )
            seats.failed(adapter_id, result)
            self._fail_waiting(adapter, result)
        if (introduction := self._introductions.get(adapter_id)) is not None:
            introduction.answers[replica_id] = result
            self._conclude(introduction)
        self._released()
        self._dispatch()

    def _fail_waiting(self, adapter: Adapter, error: TriptychError) -> None:
        """Fails the requests of an adapter that no replica large enough for them could load.

        Once every replica has failed, the next request tries all of them again.
        """
        adapter_id, hosts = adapter.adapter_id, list(self._hosts)
        failures = [replica.scheduler.adapters.failure(adapter_id) for replica in hosts]
        reason = next((one for one in failures if one is not None and one.retryable), error)
        for request in self._of(adapter_id):
            fitting = [replica for replica in hosts if replica.scheduler.fits(request)]
            if fitting and all(replica.scheduler.adapters.failure(adapter_id) for replica in fitting):
                self._fail(request, _failure(adapter, reason))
        if all(failures):
            for replica in hosts:
                replica.scheduler.adapters.forget_failure(adapter_id)

    def _of(self, adapter_id: int) -> list[Request]:
        """Returns the waiting requests of an adapter."""
        return [one for one in self._waiting if one.adapter and one.adapter.adapter_id == adapter_id]

    def detached(self, replica_id: str) -> None:
        """Expects no more answers of a lost replica."""
        for introduction in list(self._introductions.values()):
            if replica_id in introduction.answers and introduction.answers[replica_id] is None:
                del introduction.answers[replica_id]
                self._conclude(introduction)

    def _conclude(self, introduction: _Introduction) -> None:
        """Gives a new adapter its name once every replica has answered, or takes it off all of them."""
        adapter, answers = introduction.adapter, list(introduction.answers.values())
        if None in answers:
            return
        del self._introductions[adapter.adapter_id]
        facts = [answer for answer in answers if isinstance(answer, LoadedAdapter)]
        error = _refusal(adapter, facts, [answer for answer in answers if isinstance(answer, TriptychError)])
        if error is not None:
            self.registry.failed(adapter)
            self._retire(adapter.adapter_id)
            introduction.done(error)
            return
        complete, earlier = self.registry.loaded(adapter, facts[0])
        if earlier is not None:
            self._retire(earlier.adapter_id)
        self._log.info(
            "adapter_loaded", name=adapter.name, source=adapter.source, rank=complete.rank,
            digest=complete.digest, revision=complete.revision,
        )  # fmt: skip
        introduction.done(complete)

    def _retire(self, adapter_id: int) -> None:
        """Frees an adapter that no new request can name, once its last request has ended."""
        if adapter_id in self._users:
            self._retired.add(adapter_id)
        else:
            self._free(adapter_id)

    def _free(self, adapter_id: int) -> None:
        """Takes an adapter without requests off all replicas."""
        self._retired.discard(adapter_id)
        for replica in self._hosts:
            seats = replica.scheduler.adapters
            assert replica.lora is not None
            load_id = seats.loading.pop(adapter_id, None) or seats.held.get(adapter_id)
            seats.lost(adapter_id, load_id)
            seats.forget_failure(adapter_id)
            if load_id is not None:
                replica.lora.unload(load_id)


def _refusal(
    adapter: Adapter, facts: Sequence[LoadedAdapter], refusals: Sequence[TriptychError]
) -> TriptychError | None:
    """Returns why an adapter that every replica has answered for cannot be served; None if it can."""
    # A client can do most about an error of the first two kinds.
    for kind in (InvalidArgument, NotFound, TriptychError):
        for refusal in refusals:
            if isinstance(refusal, kind):
                return refusal
    if not facts:
        return Unavailable("the workers that loaded the adapter were lost; retry", retry_after_ms=2000)
    if len({each.digest for each in facts}) > 1:
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
