"""Requests that wait for their grammar, and which replicas have which grammars.

A grammar is compiled by every replica at once, and a request goes on when the first of them has it; it runs on those that do. What is
known of a grammar is kept for as long as a live request needs it. Free of I/O: replicas are asked through a callback and answer by
:meth:`GrammarDesk.compiled` and :meth:`GrammarDesk.refused`.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from protos.errors import InvalidArgument, TriptychError
from scheduler_svc.requests.request import Request, RequestState
from scheduler_svc.requests.sampling import Grammar

Ask = Callable[[Grammar], None]
"""Has a replica compile a grammar, or give that up; returns at once."""

# Grammars of one tenant that a replica compiles at once: enough to keep its threads busy, and what others wait for at most.
MAX_UNDER_WAY = 8


@dataclass(slots=True)
class _Known:
    """One grammar.

    Attributes:
        tenant: who brought it.
        users: live requests that have it.
        waiting: those that cannot run before somebody has compiled it, by id; none while somebody has.
        asked: replicas that compile it, or will when it is the tenant's turn.
        ready: replicas that have it, as far as is known.
    """

    tenant: str
    users: int = 0
    waiting: dict[str, Request] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    ready: set[str] = field(default_factory=set)


class _Line:
    """What one replica is asked: a few grammars of each tenant at a time, in the order in which they came."""

    def __init__(self, ask: Ask, withdraw: Ask) -> None:
        self._ask = ask
        self._withdraw = withdraw
        self._under_way: dict[Grammar, str] = {}
        self._count: Counter[str] = Counter()
        # By tenant; dicts for their order and for removal.
        self._next: dict[str, dict[Grammar, None]] = {}

    def ask(self, grammar: Grammar, tenant: str) -> None:
        """Asks for a grammar that is not in the line, now or when the tenant's turn comes."""
        if self._count[tenant] >= MAX_UNDER_WAY:
            self._next.setdefault(tenant, {})[grammar] = None
            return
        self._under_way[grammar] = tenant
        self._count[tenant] += 1
        self._ask(grammar)

    def answered(self, grammar: Grammar) -> None:
        """The replica has said what became of a grammar: the tenant's next one may be asked for."""
        tenant = self._under_way.pop(grammar, None)
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
        """Nobody wants a grammar any more."""
        if grammar in self._next.get(tenant, ()):
            self._drop(tenant, grammar)
        elif grammar in self._under_way:
            self._withdraw(grammar)
            self.answered(grammar)

    def _drop(self, tenant: str, grammar: Grammar) -> None:
        del self._next[tenant][grammar]
        if not self._next[tenant]:
            del self._next[tenant]


class GrammarDesk:
    """Who waits for which grammar."""

    def __init__(self) -> None:
        """Nobody waits, and there are no replicas."""
        self._known: dict[Grammar, _Known] = {}
        self._lines: dict[str, _Line] = {}
        self._num_waiting = 0
        self._num_tokens = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        """Everybody who waits, in no particular order."""
        return (request for known in self._known.values() for request in known.waiting.values())

    @property
    def num_tokens(self) -> int:
        """Tokens that they have to prefill."""
        return self._num_tokens

    def arrive(self, request: Request) -> None:
        """A request with a grammar is live from now on."""
        grammar = request.sampling.grammar
        if grammar is not None:
            self._known.setdefault(grammar, _Known(request.tenant)).users += 1

    def leave(self, request: Request) -> None:
        """It is live no more; what nobody else wants is not compiled to the end."""
        grammar = request.sampling.grammar
        known = self._known.get(grammar) if grammar is not None else None
        if grammar is None or known is None:
            return
        known.users -= 1
        if not known.users:
            del self._known[grammar]
            for replica_id in known.asked:
                self._lines[replica_id].withdraw(grammar, known.tenant)

    def may_run(self, request: Request, replica_id: str) -> bool:
        """Whether a replica could run the request at once: it has its grammar, or there is none."""
        grammar = request.sampling.grammar
        return grammar is None or replica_id in self._known[grammar].ready

    def is_expected(self, request: Request, replica_id: str) -> bool:
        """Whether it could, or is asked for the grammar and has not answered."""
        grammar = request.sampling.grammar
        return self.may_run(request, replica_id) or (
            grammar is not None and replica_id in self._known[grammar].asked
        )

    def hold(self, request: Request) -> bool:
        """Lets a live request wait until its grammar is compiled; False if somebody has it, or there is none."""
        grammar = request.sampling.grammar
        if grammar is None:
            return False
        known = self._known[grammar]
        self._ask_all(grammar, known)
        if known.ready:
            return False
        request.state = RequestState.WAITING_FOR_FSM
        known.waiting[request.request_id] = request
        self._num_waiting += 1
        self._num_tokens += len(request.token_ids)
        return True

    def remove(self, request: Request) -> bool:
        """Takes a request out; False if it does not wait here."""
        grammar = request.sampling.grammar
        known = self._known.get(grammar) if grammar is not None else None
        if known is None or known.waiting.pop(request.request_id, None) is None:
            return False
        self._num_waiting -= 1
        self._num_tokens -= len(request.token_ids)
        return True

    def compiled(self, replica_id: str, grammar: Grammar) -> list[Request]:
        """A replica has a grammar; returns who waited for it."""
        known = self._answered(replica_id, grammar)
        if known is None or replica_id not in self._lines:
            return []
        known.ready.add(replica_id)
        return self._release(known)

    def refused(self, replica_id: str, grammar: Grammar, error: TriptychError) -> list[Request]:
        """A replica will not have a grammar; returns whose end that is.

        A grammar that is wrong is wrong everywhere. Anything else may be one replica's trouble: the others are waited for.
        """
        known = self._answered(replica_id, grammar)
        if known is None or (known.asked and not isinstance(error, InvalidArgument)):
            return []
        return self._release(known)

    def lost(self, request: Request) -> set[Grammar]:
        """The replica of a request has not got its grammar any more; returns that if nobody else has."""
        grammar, replica_id = request.sampling.grammar, request.replica_id
        assert grammar is not None
        known = self._known[grammar]
        if replica_id is not None:
            known.ready.discard(replica_id)
        return set() if known.ready else {grammar}

    def attach(self, replica_id: str, ask: Ask, withdraw: Ask) -> None:
        """A replica is there: it is asked for every grammar that a live request has."""
        self._lines[replica_id] = _Line(ask, withdraw)
        for grammar, known in list(self._known.items()):
            self._ask_all(grammar, known)

    def detach(self, replica_id: str) -> set[Grammar]:
        """A replica is gone; returns the grammars that nobody has any more.

        Who is left is asked for what it had or was asked for, also who has refused before: some request may fit nowhere else.
        """
        self._lines.pop(replica_id, None)
        orphaned = set()
        for grammar, known in list(self._known.items()):
            if replica_id not in known.ready and replica_id not in known.asked:
                continue
            known.asked.discard(replica_id)
            if replica_id in known.ready:
                known.ready.discard(replica_id)
                if not known.ready:
                    orphaned.add(grammar)
            self._ask_all(grammar, known)
        return orphaned

    def _answered(self, replica_id: str, grammar: Grammar) -> _Known | None:
        if replica_id in self._lines:
            self._lines[replica_id].answered(grammar)
        known = self._known.get(grammar)
        if known is not None:
            known.asked.discard(replica_id)
        return known

    def _ask_all(self, grammar: Grammar, known: _Known) -> None:
        for replica_id, line in self._lines.items():
            if replica_id not in known.asked and replica_id not in known.ready:
                known.asked.add(replica_id)
                line.ask(grammar, known.tenant)

    def _release(self, known: _Known) -> list[Request]:
        return [request for request in list(known.waiting.values()) if self.remove(request)]
