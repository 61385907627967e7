"""Placement of the next waiting request on the best replica with room, or able to make room."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from scheduler_svc.adapters.registry import Adapter, LoadAnswer
from scheduler_svc.engine.grammar_queue import CompileRequest, GrammarQueue
from scheduler_svc.policy.learned_times import LinearTime
from scheduler_svc.policy.rules import below_share, outranks
from scheduler_svc.replica.pooling import PoolScheduler
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.requests.request import Request

# Seconds after which an idle replica with slow step times gets a request as a probe.
_PROBE_S = 60.0

# Output tokens of a request, before any request has ended.
_USUAL_OUTPUT = 256.0
# Weight of the earlier mean of them when a request ends.
_KEPT = 0.98


LoadAdapter: TypeAlias = Callable[[Adapter, int, Callable[[], Sequence[int]], LoadAnswer], None]
"""Starts loading an adapter on all ranks, given a new load id, a function that returns the load ids to keep,
and the receiver of the answer."""


@dataclass(slots=True)
class AttachedReplica:
    """A ready replica as the engine sees it. No call blocks."""

    scheduler: ReplicaScheduler | PoolScheduler
    wake: Callable[[], None]
    """Tells the replica's driver about new work."""
    ask: CompileRequest = lambda _: None
    """Starts compiling a grammar.

    The driver answers with :meth:`Engine.grammar_compiled` or `grammar_refused`.
    """
    withdraw: CompileRequest = lambda _: None
    """Cancels compiling a grammar; the driver then sends no answer."""
    failing: Callable[[], bool] = lambda: False
    """Whether the worker's last step failed; it then looks empty, because its requests leave at once."""
    load_adapter: LoadAdapter = lambda *_: None
    unload_adapter: Callable[[int], None] = lambda _: None
    """Ends a load by its id, or frees its adapter."""
    replica_id: str = field(default="", init=False)
    """Set by :meth:`Engine.attach`."""
    placed_s: float = field(default=-math.inf, init=False)
    """Clock reading of the last placement."""


class Placer:
    """Chooses the replica for a request. The engine owns the queue and its order.

    A request runs on a replica large enough for it that holds its grammar and its adapter. A request without
    room is skipped: later requests may use other replicas, but not the replicas that it waits for, or it
    would never find room there.
    """

    def __init__(self, grammars: GrammarQueue, clock: Callable[[], float]) -> None:
        """Starts without replicas; `grammars` knows their compiled grammars."""
        self.replicas: dict[str, AttachedReplica] = {}
        """Ready replicas by id."""
        self._grammars = grammars
        self._clock = clock
        self._output = _USUAL_OUTPUT
        # Replicas that skipped requests wait for, each with the rank of the first such request.
        self._claimed: dict[str, tuple[float, int]] = {}

    def settle(self, request: Request) -> bool:
        """Admits the request to a replica, preempting less urgent requests if necessary.

        Returns whether it did.
        """
        return self._place(request) or (self._preempt_for(request) and self._place(request))

    def reclaim(self, request: Request, shares: Mapping[str, float]) -> bool:
        """Admits a request of a tenant far below its share by preempting others; see `below_share`.

        Returns whether it did.
        """
        running = [
            (one, replica.scheduler.footprint(one) / len(self.replicas))
            for replica in self.replicas.values()
            if isinstance(replica.scheduler, ReplicaScheduler)
            for one in replica.scheduler.running
        ]
        leaving = below_share(request, running, shares)
        able = {replica.replica_id: replica for replica in self._candidates(request)}
        return any(
            self._preempt_on(able[name], request, [one for one in leaving if one.replica_id == name], "share")
            for name in dict.fromkeys(one.replica_id for one in leaving)
            if name in able
        ) and self._place(request)

    def skip(self, request: Request) -> bool:
        """Lets later requests pass a request without room, if it blocks a replica that it cannot use.

        A request that lacks only an adapter seat blocks no replica. It claims a seat on the replica with the
        fewest running requests.

        Returns:
            False if no other request would gain: the request stays at the head of the queue.
        """
        free = [one.scheduler for one in self._candidates(request) if one.scheduler.has_free_slot]
        adapter, rank = request.adapter, request.rank
        if free and adapter and not any(scheduler.adapters.has_room(adapter, rank) for scheduler in free):
            least = min(free, key=lambda scheduler: scheduler.num_running)
            least.adapters.claim(adapter.adapter_id, rank)
            return True
        if not any(
            replica.scheduler.has_free_slot
            and not self._suits(replica, request)
            and not self._is_claimed(replica, request)
            for replica in self.replicas.values()
        ):
            return False
        for name, replica in self.replicas.items():
            if self._suits(replica, request):
                self._claimed[name] = min(request.rank, self._claimed.get(name, request.rank))
        return True

    def has_prospects(self, request: Request) -> bool:
        """Returns whether some replica is large enough and has, or will have, the grammar and the adapter."""
        return any(self._may_suit(replica, request) for replica in self.replicas.values())

    def is_untried(self, request: Request) -> bool:
        """Returns whether a replica able to run the request has not failed it."""
        return any(
            name not in request.failed_on
            and self._may_suit(replica, request)
            and not replica.scheduler.adapters.is_paused(request.adapter)
            for name, replica in self.replicas.items()
        )

    def _may_suit(self, replica: AttachedReplica, request: Request) -> bool:
        return (
            replica.scheduler.fits(request)
            and self._grammars.is_expected(request, replica.replica_id)
            and replica.scheduler.adapters.may_load(request.adapter)
        )

    def group_of(self, request: Request) -> tuple[int, str, int, frozenset[str]]:
        """Returns the group key of a skipped request: adapter, tenant, priority and usable replicas.

        If the oldest request of a group finds no room, no other member does. Keys change with the set of
        replicas, and when a replica gets or loses a grammar. After a failure on a replica, a request's key
        also changes with the clock, when the pause of its adapter ends; a skipped request stays in its
        earlier group.
        """
        usable = frozenset(
            name
            for name, replica in self.replicas.items()
            if replica.scheduler.fits(request)
            and self._grammars.may_run(request, name)
            and not self._avoids(name, request)
        )
        adapter_id = 0 if request.adapter is None else request.adapter.adapter_id
        return adapter_id, request.tenant, request.priority, usable

    def clear_claims(self) -> None:
        """Drops the claims of skipped requests, before those are retried."""
        self._claimed.clear()
        for replica in self.replicas.values():
            replica.scheduler.adapters.clear_claims()

    def _suits(self, replica: AttachedReplica, request: Request) -> bool:
        """Returns whether the replica could run the request if it were empty."""
        name, scheduler = replica.replica_id, replica.scheduler
        has_all = self._grammars.may_run(request, name) and scheduler.adapters.holds(request.adapter)
        return scheduler.fits(request) and has_all and not self._avoids(name, request)

    def _avoids(self, replica_id: str, request: Request) -> bool:
        """Returns whether the request failed on the replica and may run on another."""
        return replica_id in request.failed_on and self.is_untried(request)

    def _is_claimed(self, replica: AttachedReplica, request: Request) -> bool:
        """Returns whether a skipped request of higher rank waits for the replica."""
        first = self._claimed.get(replica.replica_id)
        return first is not None and first < request.rank

    def _candidates(self, request: Request) -> list[AttachedReplica]:
        """Returns the replicas able to run the request, now or once they have room."""
        return [
            replica
            for replica in self.replicas.values()
            if self._suits(replica, request) and not self._is_claimed(replica, request)
        ]

    def _place(self, request: Request) -> bool:
        free = [replica for replica in self._candidates(request) if replica.scheduler.has_free_slot]
        for replica in self.by_cost(request, free) if len(free) > 1 else free:
            request.replica_id = replica.replica_id
            if replica.scheduler.admit(request):
                replica.placed_s = self._clock()
                replica.wake()
                return True
        return False

    def ended(self, request: Request) -> None:
        """Updates the mean output length with a finished request."""
        if request.num_output_tokens:
            self._output += (1 - _KEPT) * (request.num_output_tokens - self._output)

    def by_cost(self, request: Request, free: list[AttachedReplica]) -> list[AttachedReplica]:
        """Returns replicas with a free slot, the best first."""
        times = [replica.scheduler.stats.times for replica in self.replicas.values()]
        chunk = _fastest([each.chunk for each in times], _UNKNOWN_CHUNK)
        decode = _fastest([each.decode for each in times], _UNKNOWN_DECODE)
        probe_before_s = self._clock() - _PROBE_S

        def cost(replica: AttachedReplica) -> tuple[bool, bool, float, float]:
            scheduler, own = replica.scheduler, replica.scheduler.stats.times
            is_recent = replica.placed_s > probe_before_s or scheduler.num_running > 0
            seconds = self._seconds(
                request,
                replica,
                own.chunk if own.chunk.known and is_recent else chunk,
                own.decode if own.decode.known and is_recent else decode,
            )
            # Keep the sequences of a request together while there are slots: they share blocks.
            return replica.failing(), not scheduler.shares_prompt(request), seconds, replica.placed_s

        return sorted(free, key=cost)

    def _seconds(
        self, request: Request, replica: AttachedReplica, chunk: LinearTime, decode: LinearTime
    ) -> float:
        """Returns the seconds of a request on a replica, plus the delay of the other requests there.

        Others wait during its chunks, and an additional row may slow their decode steps.
        """
        scheduler = replica.scheduler
        load = scheduler.num_running + scheduler.num_deferred
        # A pooling replica takes a whole text in a step.
        size = scheduler.shapes.chunk if isinstance(scheduler, ReplicaScheduler) else len(request.token_ids)
        waits_s = _prefill_seconds(chunk, scheduler.prefill_backlog, size)
        own_s = _prefill_seconds(chunk, len(request.token_ids) - scheduler.cached_tokens(request), size)
        if not scheduler.adapters.uses(request.adapter):
            own_s += chunk.seconds  # copying an adapter to the device takes about as long as a chunk
        num_steps = min(self._output, request.end - len(request.token_ids))
        step_s = decode.at(load + 1) + load * decode.slope / 2  # others have half their steps left
        return waits_s + own_s * (1 + load) + num_steps * step_s

    def _preempt_for(self, request: Request) -> bool:
        """Makes room for a request by preempting the least urgent of the less urgent running requests."""
        candidates = [
            (least, replica)
            for replica in self._candidates(request)
            if (least := replica.scheduler.least_urgent) is not None and least > request.priority
        ]
        candidates.sort(key=lambda item: item[0], reverse=True)
        for _, replica in candidates:
            assert isinstance(replica.scheduler, ReplicaScheduler)
            lesser = [one for one in replica.scheduler.running if outranks(request, one)]
            lesser.sort(key=lambda one: one.rank, reverse=True)
            if self._preempt_on(replica, request, lesser, "priority"):
                return True
        return False

    def _preempt_on(
        self, replica: AttachedReplica, request: Request, candidates: list[Request], reason: str
    ) -> bool:
        assert isinstance(replica.scheduler, ReplicaScheduler)
        if not replica.scheduler.preempt_for(request, candidates, reason):
            return False
        replica.wake()
        return True


def _prefill_seconds(chunk: LinearTime, num_tokens: int, size: int) -> float:
    """Returns the seconds to prefill so many tokens in chunks of up to `size`."""
    whole, rest = divmod(num_tokens, size)
    return whole * chunk.at(size) + (chunk.at(rest) if rest else 0.0)


def _fastest(times: list[LinearTime], unknown: LinearTime) -> LinearTime:
    """Returns the shortest of the known times, the assumption for a replica without any."""
    return min((each for each in times if each.known), key=lambda each: each.at(1), default=unknown)


# Before any result: a device of middling speed, on which load and prefix weigh alike.
_UNKNOWN_CHUNK, _UNKNOWN_DECODE = LinearTime(), LinearTime()
for _size in (1, 512):
    _UNKNOWN_CHUNK.observe(_size, 0.005 + _size * 1e-4)
    _UNKNOWN_DECODE.observe(_size, 0.010 + _size * 1e-4)
