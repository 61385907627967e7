"""Placement of the next waiting request: on the best replica that has room for it or can make room."""

from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.dispatch.adapter_queue import AdapterHost, AdapterQueue
from scheduler_svc.dispatch.grammar_queue import CompileRequest, GrammarQueue
from scheduler_svc.policy.rules import placement_cost
from scheduler_svc.replica.pooling import PoolScheduler
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.replica.slots import AdmitResult
from scheduler_svc.requests.request import Request
from scheduler_svc.requests.sampling import Grammar


@dataclass(slots=True)
class AttachedReplica:
    """A ready replica as the engine sees it."""

    scheduler: ReplicaScheduler | PoolScheduler
    wake: Callable[[], None]
    """Tells the replica's driver that there is work."""
    ask: CompileRequest = lambda _: None
    """Starts compiling a grammar.

    The driver answers with :meth:`Engine.grammar_compiled` or `grammar_refused`.
    """
    withdraw: CompileRequest = lambda _: None
    """Cancels compiling a grammar; the driver then sends no answer."""
    failing: Callable[[], bool] = lambda: False
    """Whether the worker's last step failed; it then looks empty, because its requests leave at once."""
    lora: AdapterHost | None = None
    """What holds LoRA adapters beside the device; None if the replica runs none."""


class Placer:
    """Chooses the replica for a request. The engine owns the queue and its order.

    A request runs on a replica that is large enough and has its grammar and its adapter. One that finds no
    room is skipped: requests behind it may use other replicas. They may not use the replicas that it waits
    for, or it would never find room there.
    """

    def __init__(self, grammars: GrammarQueue, adapters: AdapterQueue) -> None:
        """Starts without replicas; the queues know which replicas have which grammars and adapters."""
        self.replicas: dict[str, AttachedReplica] = {}
        """Ready replicas by id."""
        self._grammars = grammars
        self._adapters = adapters
        # Replicas that skipped requests wait for, each with the rank of the first such request.
        self._claimed: dict[str, tuple[float, int]] = {}

    def settle(self, request: Request) -> bool:
        """Admits the request to a replica, preempting less urgent requests if it must.

        Returns whether it did.
        """
        # Stay with this request until it is placed. A preempted request may be the queue's head by age and
        # would otherwise take its slot back again and again.
        while not self._place(request):
            if not self._preempt_for(request):
                return False
        return True

    def skip(self, request: Request) -> bool:
        """Lets other requests pass one that found no room, if it blocks a replica that it cannot use.

        A request that lacks nothing but an adapter slot blocks no replica. It claims a slot on the replica
        with the fewest running requests.

        Returns:
            False if no other request would gain: the request stays at the head of the queue.
        """
        free = [
            replica.scheduler for _, replica in self._candidates(request) if replica.scheduler.has_free_slot
        ]
        adapter, rank = request.adapter, request.rank
        if free and adapter and not any(scheduler.adapters.has_room(adapter, rank) for scheduler in free):
            least = min(free, key=lambda scheduler: scheduler.num_running)
            least.adapters.claim(adapter.adapter_id, rank)
            return True
        if not any(
            replica.scheduler.has_free_slot
            and not self._suits(name, request)
            and not self._is_claimed(name, request)
            for name, replica in self.replicas.items()
        ):
            return False
        for name in self.replicas:
            if self._suits(name, request):
                self._claimed[name] = min(request.rank, self._claimed.get(name, request.rank))
        return True

    def has_prospects(self, request: Request) -> bool:
        """Returns whether some replica is large enough for the request and has what it needs, or will."""
        return any(self._may_suit(name, request) for name in self.replicas)

    def is_untried(self, request: Request) -> bool:
        """Returns whether some replica that can run the request has not failed it."""
        return any(
            name not in request.failed_on
            and self._may_suit(name, request)
            and not self._adapters.is_paused(request, name)
            for name in self.replicas
        )

    def _may_suit(self, replica_id: str, request: Request) -> bool:
        """Returns whether the replica can run the request once it has its grammar and its adapter."""
        return (
            self.replicas[replica_id].scheduler.fits(request)
            and self._grammars.is_expected(request, replica_id)
            and self._adapters.is_expected(request, replica_id)
        )

    def group_of(self, request: Request) -> tuple[Grammar | None, int, str, frozenset[str]]:
        """Returns the key of a skipped request's group: grammar, adapter, tenant and the replicas to use.

        If the oldest request of a group finds no room, no other request of the group does. Keys change with
        the set of replicas. The key of a request that failed on a replica changes with the clock, too, when
        the pause of its adapter ends; a skipped request stays in the group of its key at that time.
        """
        usable = frozenset(
            name
            for name, replica in self.replicas.items()
            if replica.scheduler.fits(request) and not self._avoids(name, request)
        )
        adapter_id = 0 if request.adapter is None else request.adapter.adapter_id
        return request.sampling.grammar, adapter_id, request.tenant, usable

    def clear_claims(self) -> None:
        """Forgets which replicas skipped requests wait for, before those requests are retried."""
        self._claimed.clear()
        for replica in self.replicas.values():
            replica.scheduler.adapters.clear_claims()

    def _suits(self, replica_id: str, request: Request) -> bool:
        """Returns whether the request could run on the replica if it were empty."""
        fits = self.replicas[replica_id].scheduler.fits(request)
        has_all = self._grammars.may_run(request, replica_id) and self._adapters.may_run(request, replica_id)
        return fits and has_all and not self._avoids(replica_id, request)

    def _avoids(self, replica_id: str, request: Request) -> bool:
        """Returns whether the replica has failed the request, which can run on another one."""
        return replica_id in request.failed_on and self.is_untried(request)

    def _is_claimed(self, replica_id: str, request: Request) -> bool:
        """Returns whether a skipped request that ranks before `request` waits for the replica."""
        first = self._claimed.get(replica_id)
        return first is not None and first < request.rank

    def _candidates(self, request: Request) -> list[tuple[str, AttachedReplica]]:
        """Returns the replicas that may run the request, now or once they have room."""
        return [
            (name, replica)
            for name, replica in self.replicas.items()
            if self._suits(name, request) and not self._is_claimed(name, request)
        ]

    def _place(self, request: Request) -> bool:
        free = [
            (name, replica) for name, replica in self._candidates(request) if replica.scheduler.has_free_slot
        ]
        if len(free) > 1:
            # Keep the sequences of one request together while there are slots: they share blocks.
            free.sort(
                key=lambda item: (
                    item[1].failing(),
                    not item[1].scheduler.shares_prompt(request),
                    placement_cost(request, item[1].scheduler),
                )
            )
        for name, replica in free:
            request.replica_id = name
            result = replica.scheduler.admit(request)
            if result is AdmitResult.ADMITTED:
                self._adapters.used(request, name)
            if result is not AdmitResult.NO_ROOM:
                replica.wake()
                return True
        return False

    def _preempt_for(self, request: Request) -> bool:
        """Preempts the least urgent running request if the waiting one is more urgent."""
        candidates = [
            (least, replica)
            for _, replica in self._candidates(request)
            if (least := replica.scheduler.least_urgent) is not None and least > request.priority
        ]
        candidates.sort(key=lambda item: item[0], reverse=True)
        for _, replica in candidates:
            if replica.scheduler.preempt_for(request):
                replica.wake()
                return True
        return False
