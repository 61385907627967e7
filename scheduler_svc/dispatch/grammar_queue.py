"""Requests that wait for a grammar, and the replicas that have compiled each grammar.

All replicas compile a grammar at once. A waiting request continues as soon as one replica has the grammar,
and runs only on replicas that have it. An entry lives as long as some live request uses its grammar. The
queue does no I/O: it asks replicas through callbacks, and the engine reports their answers with
:meth:`GrammarQueue.compiled` and :meth:`GrammarQueue.refused`.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from protos.errors import InvalidArgument, TriptychError
from scheduler_svc.policy.tenants import Tenants
from scheduler_svc.requests.request import Request, RequestState
from scheduler_svc.requests.sampling import Grammar

CompileRequest = Callable[[Grammar], None]
"""Starts or cancels compiling a grammar on one replica; returns at once."""

# Grammars of one tenant that a replica compiles at once. This keeps its compiler threads busy and bounds how
# long the grammars of other tenants wait.
MAX_COMPILING_PER_TENANT = 8


@dataclass(slots=True)
class _Entry:
    """The state of one grammar."""

    tenant: str
    """The tenant of the first request that used the grammar."""
    users: int = 0
    """Live requests that use the grammar."""
    waiting: dict[str, Request] = field(default_factory=dict)
    """Requests that wait for the first replica to compile the grammar, by id; empty once a replica has it."""
    asked: set[str] = field(default_factory=set)
    """Replicas that compile the grammar or have it in their line."""
    ready: set[str] = field(default_factory=set)
    """Replicas that have compiled the grammar."""


class _Line:
    """The compile requests of one replica: in order of arrival, with a limit per tenant."""

    def __init__(self, ask: CompileRequest, withdraw: CompileRequest) -> None:
        self._ask = ask
        self._withdraw = withdraw
        self._compiling: dict[Grammar, str] = {}
        self._count: Counter[str] = Counter()
        # By tenant. The inner dicts are ordered sets that allow removal.
        self._next: dict[str, dict[Grammar, None]] = {}

    @property
    def idle(self) -> bool:
        """Whether the replica compiles nothing and no grammar waits in the line."""
        return not self._compiling and not self._next

    def ask(self, grammar: Grammar, tenant: str) -> None:
        """Sends a grammar to the replica now, or once the tenant is below its limit."""
        if self._count[tenant] >= MAX_COMPILING_PER_TENANT:
            self._next.setdefault(tenant, {})[grammar] = None
            return
        self._compiling[grammar] = tenant
        self._count[tenant] += 1
        self._ask(grammar)

    def answered(self, grammar: Grammar) -> None:
        """Ends a compile request and sends the tenant's next one."""
        tenant = self._compiling.pop(grammar, None)
        if tenant is None:
            return
        self._count[tenant] -= 1
        if not self._count[tenant]:
            del self._count[tenant]
        if waiting := self._next.get(tenant):
            following = next(iter(waiting))
            self._drop(tenant, following)
            self.ask(following, tenant)

    def withdraw(self, grammar: Grammar, tenant: str) -> None:
        """Cancels a compile request after the last user of its grammar has ended."""
        if grammar in self._next.get(tenant, ()):
            self._drop(tenant, grammar)
        elif grammar in self._compiling:
            self._withdraw(grammar)
            self.answered(grammar)

    def _drop(self, tenant: str, grammar: Grammar) -> None:
        del self._next[tenant][grammar]
        if not self._next[tenant]:
            del self._next[tenant]


class GrammarQueue:
    """Requests that wait for a grammar, by grammar."""

    def __init__(self, tenants: Tenants) -> None:
        """Starts without requests and replicas; `tenants` counts the requests while they wait."""
        self._entries: dict[Grammar, _Entry] = {}
        self._lines: dict[str, _Line] = {}
        self._num_waiting = 0
        self._tenants = tenants

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        """Yields every waiting request, in no particular order."""
        return (request for entry in self._entries.values() for request in entry.waiting.values())

    @property
    def idle(self) -> bool:
        """Whether no live request uses a grammar and no replica compiles one."""
        return not self._entries and all(line.idle for line in self._lines.values())

    def add_user(self, request: Request) -> None:
        """Counts a new live request as a user of its grammar, if it has one."""
        grammar = request.sampling.grammar
        if grammar is not None:
            self._entries.setdefault(grammar, _Entry(request.tenant)).users += 1

    def remove_user(self, request: Request) -> None:
        """Ends the use of a grammar by a request that ended; cancels its compilation after the last user."""
        grammar = request.sampling.grammar
        entry = self._entries.get(grammar) if grammar is not None else None
        if grammar is None or entry is None:
            return
        entry.users -= 1
        if not entry.users:
            del self._entries[grammar]
            for replica_id in entry.asked:
                self._lines[replica_id].withdraw(grammar, entry.tenant)

    def may_run(self, request: Request, replica_id: str) -> bool:
        """Returns whether the replica has the request's grammar, or the request has none."""
        grammar = request.sampling.grammar
        return grammar is None or replica_id in self._entries[grammar].ready

    def is_expected(self, request: Request, replica_id: str) -> bool:
        """Returns whether the replica may run the request now or after a compilation that is still open."""
        grammar = request.sampling.grammar
        return self.may_run(request, replica_id) or (
            grammar is not None and replica_id in self._entries[grammar].asked
        )

    def hold(self, request: Request) -> bool:
        """Enqueues a live request until its grammar is compiled.

        Returns:
            False if the request has no grammar or some replica has compiled it: the request need not wait.
        """
        grammar = request.sampling.grammar
        if grammar is None:
            return False
        entry = self._entries[grammar]
        self._ask_all(grammar, entry)
        if entry.ready:
            return False
        request.state = RequestState.WAITING_FOR_FSM
        entry.waiting[request.request_id] = request
        self._num_waiting += 1
        self._tenants.add(request)
        return True

    def remove(self, request: Request) -> bool:
        """Removes a request; returns False if it does not wait here."""
        grammar = request.sampling.grammar
        entry = self._entries.get(grammar) if grammar is not None else None
        if entry is None or entry.waiting.pop(request.request_id, None) is None:
            return False
        self._num_waiting -= 1
        self._tenants.remove(request)
        return True

    def compiled(self, replica_id: str, grammar: Grammar) -> list[Request]:
        """Records that a replica has a grammar; removes and returns the requests that waited for it."""
        entry = self._answered(replica_id, grammar)
        if entry is None or replica_id not in self._lines:
            return []
        entry.ready.add(replica_id)
        return self._release(entry)

    def refused(self, replica_id: str, grammar: Grammar, error: TriptychError) -> list[Request]:
        """Records that a replica cannot compile a grammar.

        Removes and returns the requests that fail with it.

        An invalid grammar is invalid on every replica. Any other error may be local: if another replica still
        compiles the grammar, its requests keep waiting.
        """
        entry = self._answered(replica_id, grammar)
        if entry is None or (entry.asked and not isinstance(error, InvalidArgument)):
            return []
        return self._release(entry)

    def evicted(self, request: Request) -> set[Grammar]:
        """Records that the request's replica no longer has its grammar.

        Returns the grammar if no replica has it.
        """
        grammar, replica_id = request.sampling.grammar, request.replica_id
        assert grammar is not None
        entry = self._entries[grammar]
        if replica_id is not None:
            entry.ready.discard(replica_id)
        return set() if entry.ready else {grammar}

    def attach(self, replica_id: str, ask: CompileRequest, withdraw: CompileRequest) -> None:
        """Adds a replica and asks it for the grammar of every live request."""
        self._lines[replica_id] = _Line(ask, withdraw)
        for grammar, entry in list(self._entries.items()):
            self._ask_all(grammar, entry)

    def detach(self, replica_id: str) -> set[Grammar]:
        """Removes a replica and returns the grammars that no replica has now.

        The other replicas are asked again for every grammar that the lost one had or was compiling. This
        includes replicas that refused before, because some request may fit nowhere else.
        """
        self._lines.pop(replica_id, None)
        orphaned = set()
        for grammar, entry in list(self._entries.items()):
            if replica_id not in entry.ready and replica_id not in entry.asked:
                continue
            entry.asked.discard(replica_id)
            if replica_id in entry.ready:
                entry.ready.discard(replica_id)
                if not entry.ready:
                    orphaned.add(grammar)
            self._ask_all(grammar, entry)
        return orphaned

    def _answered(self, replica_id: str, grammar: Grammar) -> _Entry | None:
        if replica_id in self._lines:
            self._lines[replica_id].answered(grammar)
        entry = self._entries.get(grammar)
        if entry is not None:
            entry.asked.discard(replica_id)
        return entry

    def _ask_all(self, grammar: Grammar, entry: _Entry) -> None:
        for replica_id, line in self._lines.items():
            if replica_id not in entry.asked and replica_id not in entry.ready:
                entry.asked.add(replica_id)
                line.ask(grammar, entry.tenant)

    def _release(self, entry: _Entry) -> list[Request]:
        return [request for request in list(entry.waiting.values()) if self.remove(request)]
