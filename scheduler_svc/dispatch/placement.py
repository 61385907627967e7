"""A place for the request whose turn it is: on the best replica that has room for it, or can make some."""

from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.dispatch.grammar_queue import Ask, GrammarDesk
from scheduler_svc.dispatch.pinned_prefixes import PinnedPrefixes
from scheduler_svc.policy.placement import PlacementPolicy
from scheduler_svc.replica.scheduler import AdmitResult, ReplicaScheduler
from scheduler_svc.requests.request import Request
from scheduler_svc.requests.sampling import Grammar


@dataclass(slots=True)
class AttachedReplica:
    """A ready replica: its scheduler, and how to tell its driver that there is work."""

    scheduler: ReplicaScheduler
    wake: Callable[[], None]
    ask: Ask = lambda _: None
    """Has its worker compile a grammar; the answer comes to :meth:`Engine.grammar_compiled` or :meth:`Engine.grammar_refused`."""
    withdraw: Ask = lambda _: None
    """Nobody wants that grammar any more, and no answer."""


class Placer:
    """Decides where requests run. The queue and the order are the engine's business.

    A request runs where its grammar was compiled, if it has one, and on replicas that are large enough. If it finds no room there it
    steps aside, and whoever comes behind it may have the other replicas, but nothing of those that it waits for: they would never have
    room for it otherwise.

    Attributes:
        replicas: ready replicas by id.
    """

    def __init__(self, policy: PlacementPolicy, grammars: GrammarDesk, pinned: PinnedPrefixes) -> None:
        """Starts without replicas.

        Args:
            policy: who is best.
            grammars: which replicas have which grammars.
            pinned: what may be given up where nothing else helps.
        """
        self.replicas: dict[str, AttachedReplica] = {}
        self._policy = policy
        self._grammars = grammars
        self._pinned = pinned
        # Replicas that somebody aside waits for, with the rank of the first of them.
        self._claimed: dict[str, tuple[float, int]] = {}

    def settle(self, request: Request) -> bool:
        """Finds a place for the request, which belongs to a replica then, at the cost of what is less urgent if need be."""
        # One request until it has a place: who gave way may be the queue's head by its age, and would get its place back for ever.
        while not self._place(request):
            if not self._make_way(request) and not self._drop_idle_pins(request):
                return False
        return True

    def step_aside(self, request: Request) -> bool:
        """Lets others pass a request that has found no place, if it would keep them from a replica with room where it cannot run itself.

        Returns:
            False if nobody gains by that: the request stays the first of the queue.
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
        """Whether some replica is large enough for the request and has its grammar, or is asked for it."""
        return any(
            replica.scheduler.kv.fits(request.end) and self._grammars.is_expected(request, name)
            for name, replica in self.replicas.items()
        )

    def alike(self, request: Request) -> tuple[Grammar | None, str, frozenset[str]]:
        """What requests have in common of which none has a turn before another one that came first, nor finds room where that does not.

        Returns:
            Its grammar, its tenant and the replicas that are large enough for it; the same for as long as the replicas are.
        """
        large = frozenset(
            name for name, replica in self.replicas.items() if replica.scheduler.kv.fits(request.end)
        )
        return request.sampling.grammar, request.tenant, large

    def claim_nothing(self) -> None:
        """Who is aside looks for room again."""
        self._claimed.clear()

    def _suits(self, replica_id: str, request: Request) -> bool:
        """Whether the request could run there if nobody else did."""
        fits = self.replicas[replica_id].scheduler.kv.fits(request.end)
        return fits and self._grammars.may_run(request, replica_id)

    def _is_claimed(self, replica_id: str, request: Request) -> bool:
        """Whether somebody aside comes before the request and waits for that replica."""
        first = self._claimed.get(replica_id)
        return first is not None and first < request.rank

    def _able(self, request: Request) -> list[tuple[str, AttachedReplica]]:
        """Replicas that the request may have, now or when there is room."""
        return [
            (name, replica)
            for name, replica in self.replicas.items()
            if self._suits(name, request) and not self._is_claimed(name, request)
        ]

    def _place(self, request: Request) -> bool:
        free = [(name, replica) for name, replica in self._able(request) if replica.scheduler.has_free_slot]
        if len(free) > 1:
            # The sequences of one request stay together as long as there are slots: what they share lies in one memory.
            free.sort(
                key=lambda one: (
                    not one[1].scheduler.shares_prompt(request),
                    self._policy.cost(request, one[1].scheduler),
                )
            )
        for name, replica in free:
            request.replica_id = name
            if replica.scheduler.admit(request) is not AdmitResult.NO_ROOM:
                replica.wake()
                return True
        return False

    def _make_way(self, request: Request) -> bool:
        """Lets the least urgent running request give way, if the waiting one is more urgent."""
        candidates = [
            (least, replica)
            for _, replica in self._able(request)
            if (least := replica.scheduler.least_urgent) is not None and least > request.priority
        ]
        candidates.sort(key=lambda one: one[0], reverse=True)
        for _, replica in candidates:
            if replica.scheduler.make_way(request):
                replica.wake()
                return True
        return False

    def _drop_idle_pins(self, request: Request) -> bool:
        """Gives up the pins of a replica where nothing runs and the request would fit: nothing else would ever make room there."""
        return any(
            replica.scheduler.idle and self._pinned.drop(replica.scheduler)
            for _, replica in self._able(request)
        )
