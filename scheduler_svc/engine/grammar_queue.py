"""Requests waiting for a grammar, and the replicas holding each compiled grammar.

Grammars are compiled only for the next requests in line. A worker compiling for every waiting request would
evict the first grammars before their requests get a slot. A grammar *opens* with the requests to all replicas
to compile it, and starts when its first request gets a slot; the number in between is limited. A waiting
request continues once any replica holds the grammar, and runs only on replicas that do. The queue does no
I/O: it calls replicas through callbacks, and the engine reports their answers with
:meth:`GrammarQueue.compiled` and :meth:`GrammarQueue.refused`.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from protos.errors import InvalidArgument, TriptychError
from scheduler_svc.policy.tenants import Tenants
from scheduler_svc.requests.request import Request, RequestState
from scheduler_svc.requests.sampling import Grammar

CompileRequest = Callable[[Grammar], None]
"""Starts or cancels compiling a grammar on a replica; returns at once."""

MAX_OPEN: Final = 16
"""Most open grammars: enough to keep a replica's compiler threads busy, few enough for its cache."""
MAX_OPEN_PER_TENANT: Final = 8
"""Most open grammars per tenant, so that no tenant waits for another's grammars to start."""


@dataclass(slots=True)
class _Entry:
    """The state of a grammar."""

    tenant: str
    priority: int
    """Tenant and priority of the grammar's first request."""
    users: dict[str, Request] = field(default_factory=dict)
    """Live requests with the grammar, by id."""
    waiting: dict[str, Request] = field(default_factory=dict)
    """Requests waiting for the first replica to compile the grammar, by id; empty afterwards."""
    asked: set[str] = field(default_factory=set)
    """Replicas compiling the grammar."""
    ready: set[str] = field(default_factory=set)
    """Replicas holding the compiled grammar."""
    opened: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether a request without a slot needs the grammar."""
        return any(request.slot is None for request in self.users.values())


class GrammarQueue:
    """Requests waiting for a grammar, by grammar."""

    def __init__(self, tenants: Tenants) -> None:
        """Starts without requests and replicas; `tenants` counts the requests while they wait."""
        self._tenants = tenants
        self._entries: dict[Grammar, _Entry] = {}
        self._replicas: dict[str, tuple[CompileRequest, CompileRequest]] = {}
        # Grammars opened and not started.
        self._open: dict[Grammar, _Entry] = {}
        # By tenant, a heap of grammars to open, by the rank of their first request.
        self._line: dict[str, list[tuple[tuple[float, int], int, Grammar, _Entry]]] = {}
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[Request]:
        """Yields every waiting request, in no particular order."""
        return (request for entry in self._entries.values() for request in entry.waiting.values())

    def waiting_users(self, grammar: Grammar) -> list[Request]:
        """Returns the live requests of a grammar that are on no replica."""
        waits = (RequestState.WAITING, RequestState.WAITING_FOR_FSM)
        entry = self._entries.get(grammar)
        return [one for one in entry.users.values() if one.state in waits] if entry is not None else []

    def add_user(self, request: Request) -> None:
        """Adds a new live request to the users of its grammar, if any."""
        grammar = request.sampling.grammar
        if grammar is not None:
            entry = self._entries.setdefault(grammar, _Entry(request.tenant, request.priority))
            entry.users[request.request_id] = request

    def remove_user(self, request: Request) -> None:
        """Ends the use of a grammar by a finished request; after the last user, cancels its compilation."""
        grammar = request.sampling.grammar
        entry = self._entries.get(grammar) if grammar is not None else None
        if grammar is None or entry is None:
            return
        entry.users.pop(request.request_id, None)
        if not entry.users:
            del self._entries[grammar]
            for replica_id in entry.asked:
                self._replicas[replica_id][1](grammar)
            self._close(grammar)

    def may_run(self, request: Request, replica_id: str) -> bool:
        """Returns whether the replica holds the request's grammar; True without a grammar."""
        grammar = request.sampling.grammar
        return grammar is None or replica_id in self._entries[grammar].ready

    def is_expected(self, request: Request, replica_id: str) -> bool:
        """Returns whether the replica may run the request now or after a compilation to come."""
        grammar = request.sampling.grammar
        if grammar is None:
            return True
        entry = self._entries[grammar]
        return not entry.opened or replica_id in entry.ready or replica_id in entry.asked

    def hold(self, request: Request) -> bool:
        """Enqueues a live request until its grammar is compiled.

        Returns:
            False if the request need not wait: without a grammar, or if a replica has compiled it.
        """
        grammar = request.sampling.grammar
        if grammar is None:
            return False
        entry = self._entries[grammar]
        if entry.opened:
            self._ask_all(grammar, entry)
        if entry.ready:
            return False
        request.state = RequestState.WAITING_FOR_FSM
        entry.waiting[request.request_id] = request
        self._tenants.add(request)
        if not entry.opened:
            line = self._line.setdefault(entry.tenant, [])
            heapq.heappush(line, (request.rank, next(self._numbers), grammar, entry))
            self._open_next()
        return True

    def remove(self, request: Request) -> bool:
        """Removes a request; returns whether it waited here."""
        grammar = request.sampling.grammar
        entry = self._entries.get(grammar) if grammar is not None else None
        if entry is None or entry.waiting.pop(request.request_id, None) is None:
            return False
        self._tenants.remove(request)
        return True

    def started(self, request: Request) -> None:
        """Records a request's new slot: its replica keeps the grammar from now on."""
        if request.sampling.grammar is not None:
            self._close(request.sampling.grammar)

    def compiled(self, replica_id: str, grammar: Grammar) -> list[Request]:
        """Records a grammar compiled by a replica; removes and returns the requests waiting for it."""
        entry = self._entries.get(grammar)
        if entry is None or replica_id not in self._replicas:
            return []
        entry.asked.discard(replica_id)
        entry.ready.add(replica_id)
        return self._release(entry)

    def refused(self, replica_id: str, grammar: Grammar, error: TriptychError) -> list[Request]:
        """Records a failed compilation; removes and returns the requests failing with it.

        An invalid grammar is invalid on every replica. Any other error may be local: while another replica
        compiles the grammar, its requests keep waiting.
        """
        entry = self._entries.get(grammar)
        if entry is None:
            return []
        entry.asked.discard(replica_id)
        return [] if entry.asked and not isinstance(error, InvalidArgument) else self._release(entry)

    def evicted(self, request: Request) -> set[Grammar]:
        """Records the loss of a request's grammar by its replica; returns it if no other replica holds it."""
        grammar, replica_id = request.sampling.grammar, request.replica_id
        assert grammar is not None
        entry = self._entries[grammar]
        if replica_id is not None:
            entry.ready.discard(replica_id)
        return set() if entry.ready else {grammar}

    def attach(self, replica_id: str, ask: CompileRequest, withdraw: CompileRequest) -> None:
        """Adds a replica, asks it for every opened grammar still wanted, and opens further grammars."""
        self._replicas[replica_id] = ask, withdraw
        for grammar, entry in list(self._entries.items()):
            if entry.opened and entry.is_wanted:
                self._ask_all(grammar, entry)
        self._open_next()

    def detach(self, replica_id: str) -> set[Grammar]:
        """Removes a replica and returns the grammars held by no other.

        The other replicas are asked again for every wanted grammar held or being compiled by the lost
        replica, including replicas that refused before, because some request may fit nowhere else.
        """
        self._replicas.pop(replica_id, None)
        orphaned = set()
        for grammar, entry in list(self._entries.items()):
            if replica_id not in entry.ready and replica_id not in entry.asked:
                continue
            entry.asked.discard(replica_id)
            if replica_id in entry.ready:
                entry.ready.discard(replica_id)
                if not entry.ready:
                    orphaned.add(grammar)
            if entry.is_wanted:
                self._ask_all(grammar, entry)
        return orphaned

    def _ask_all(self, grammar: Grammar, entry: _Entry) -> None:
        entry.opened = True
        for replica_id, (ask, _) in self._replicas.items():
            if replica_id not in entry.asked and replica_id not in entry.ready:
                entry.asked.add(replica_id)
                ask(grammar)

    def _open_next(self) -> None:
        """Opens grammars up to the limits: by urgency of their requests, then by tenants' shares."""
        while self._replicas and (
            able := [one for one in map(self._first, list(self._line)) if one is not None]
        ):
            grammar, entry = min(able, key=lambda one: (one[1].priority, self._tenants[one[1].tenant]))
            heapq.heappop(self._line[entry.tenant])
            self._open[grammar] = entry
            self._ask_all(grammar, entry)

    def _first(self, tenant: str) -> tuple[Grammar, _Entry] | None:
        """Returns a tenant's next grammar if the limits allow it; less urgent grammars do not count."""
        line = self._line[tenant]
        while line and (line[0][3].opened or not line[0][3].waiting):
            heapq.heappop(line)
        if not line:
            del self._line[tenant]
            return None
        grammar, entry = line[0][2:]
        before = [one for one in self._open.values() if one.priority <= entry.priority]
        own = sum(one.tenant == tenant for one in before)
        return (grammar, entry) if len(before) < MAX_OPEN and own < MAX_OPEN_PER_TENANT else None

    def _close(self, grammar: Grammar) -> None:
        if self._open.pop(grammar, None) is not None:
            self._open_next()

    def _release(self, entry: _Entry) -> list[Request]:
        return [request for request in list(entry.waiting.values()) if self.remove(request)]
