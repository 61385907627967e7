"""Placement of the next waiting request: on the best replica that has room for it or can make room."""

from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.dispatch.grammar_queue import CompileRequest, GrammarQueue
from scheduler_svc.dispatch.pinned_prefixes import PinnedPrefixes
from scheduler_svc.policy.placement import PlacementPolicy
from scheduler_svc.replica.scheduler import AdmitResult, ReplicaScheduler
from scheduler_svc.requests.request import Request
from scheduler_svc.requests.sampling import Grammar


@dataclass(slots=True)
class AttachedReplica:
    """A ready replica as the engine sees it."""

    scheduler: ReplicaScheduler
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


class Placer:
    """Chooses the replica for a request. The engine owns the queue and its order.

    A request runs on a replica that is large enough and has its grammar. A request that finds no room is
    skipped: requests behind it may use other replicas. They may not use the replicas that it waits for, or it
    would never find room there.
    """

    def __init__(self, policy: PlacementPolicy, grammars: GrammarQueue, pinned: PinnedPrefixes) -> None:
        """Starts without replicas.

        Args:
            policy: ranks the replicas that have room.
            grammars: which replicas have which grammars.
            pinned: pins that may be dropped when a request fits nowhere otherwise.
        """
        self.replicas: dict[str, AttachedReplica] = {}
        """Ready replicas by id."""
        self._policy = policy
        self._grammars = grammars
        self._pinned = pinned
        # Replicas that skipped requests wait for, each with the rank of the first such request.
        self._claimed: dict[str, tuple[float, int]] = {}

    def settle(self, request: Request) -> bool:
        """Admits the request to a replica, preempting less urgent requests if it must.

        Returns whether it did.
        """
        # Stay with this request until it is placed. A preempted request may be the queue's head by age and
        # would otherwise take its slot back again and again.
        while not self._place(request):
            if not self._preempt_for(request) and not self._drop_idle_pins(request):
                return False
        return True

    def skip(self, request: Request) -> bool:
        """Lets other requests pass one that found no room, if it blocks a replica that it cannot use.

        Returns:
            False if no other request would gain: the request stays at the head of the queue.
        """
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
        """Returns whether some replica is large enough for the request and has its grammar or compiles it."""
        return any(
            replica.scheduler.fits(request) and self._grammars.is_expected(request, name)
            for name, replica in self.replicas.items()
        )

    def is_untried(self, request: Request) -> bool:
        """Returns whether some replica that can run the request has not failed it."""
        return any(
            name not in request.failed_on
            and replica.scheduler.fits(request)
            and self._grammars.is_expected(request, name)
            for name, replica in self.replicas.items()
        )

    def group_of(self, request: Request) -> tuple[Grammar | None, str, frozenset[str]]:
        """Returns the key of a skipped request's group: grammar, tenant and the replicas that it may use.

        If the oldest request of a group finds no room, no other request of the group does. Keys stay valid
        until the set of replicas changes.
        """
        usable = frozenset(
            name
            for name, replica in self.replicas.items()
            if replica.scheduler.fits(request) and not self._avoids(name, request)
        )
        return request.sampling.grammar, request.tenant, usable

    def clear_claims(self) -> None:
        """Forgets which replicas skipped requests wait for, before those requests are retried."""
        self._claimed.clear()

    def _suits(self, replica_id: str, request: Request) -> bool:
        """Returns whether the request could run on the replica if it were empty."""
        fits = self.replicas[replica_id].scheduler.fits(request)
        return fits and self._grammars.may_run(request, replica_id) and not self._avoids(replica_id, request)

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
                    self._policy.cost(request, item[1].scheduler),
                )
            )
        for name, replica in free:
            request.replica_id = name
            if replica.scheduler.admit(request) is not AdmitResult.NO_ROOM:
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

    def _drop_idle_pins(self, request: Request) -> bool:
        """Drops the pins of an idle replica that suits the request: nothing else frees blocks there."""
        return any(
            replica.scheduler.idle and self._pinned.drop(replica.scheduler)
            for _, replica in self._candidates(request)
        )
