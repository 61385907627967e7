"""Requests that wait for their grammar, and which replicas have which grammars.

A grammar is compiled by every replica at once, and a request goes on when the first of them has it; it runs on those that do. What is
known of a grammar is kept for as long as a live request needs it. Free of I/O: replicas are asked through a callback and answer by
:meth:`GrammarDesk.compiled` and :meth:`GrammarDesk.refused`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from protos.errors import InvalidArgument, TriptychError
from scheduler_svc.request import Request, RequestState
from scheduler_svc.sampling import Grammar

Ask = Callable[[Grammar], None]
"""Has a replica compile a grammar; returns at once."""


@dataclass(slots=True)
class _Known:
    """One grammar.

    Attributes:
        users: live requests that have it.
        waiting: those that cannot run before somebody has compiled it, by id.
        asked: replicas that compile it.
        ready: replicas that have it, as far as is known.
    """

    users: int = 0
    waiting: dict[str, Request] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    ready: set[str] = field(default_factory=set)


class GrammarDesk:
    """Who waits for which grammar."""

    def __init__(self) -> None:
        """Nobody waits, and there are no replicas."""
        self._known: dict[Grammar, _Known] = {}
        self._replicas: dict[str, Ask] = {}
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
        if request.sampling.grammar is not None:
            self._known.setdefault(request.sampling.grammar, _Known()).users += 1

    def leave(self, request: Request) -> None:
        """It is live no more."""
        grammar = request.sampling.grammar
        known = self._known.get(grammar) if grammar is not None else None
        if grammar is None or known is None:
            return
        known.users -= 1
        if not known.users:
            del self._known[grammar]

    def may_run(self, request: Request, replica_id: str) -> bool:
        """Whether a replica could run the request at once: it has its grammar, or there is none."""
        grammar = request.sampling.grammar
        return grammar is None or replica_id in self._known[grammar].ready

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

    def drain(self) -> list[Request]:
        """Takes all requests out."""
        return [request for request in list(self) if self.remove(request)]

    def compiled(self, replica_id: str, grammar: Grammar) -> list[Request]:
        """A replica has a grammar; returns who waited for it."""
        known = self._known.get(grammar)
        if known is None or replica_id not in self._replicas:
            return []
        known.asked.discard(replica_id)
        known.ready.add(replica_id)
        return self._release(known)

    def refused(self, replica_id: str, grammar: Grammar, error: TriptychError) -> list[Request]:
        """A replica will not have a grammar; returns whose end that is.

        A grammar that is wrong is wrong everywhere. Anything else may be one replica's trouble: the others are waited for.
        """
        known = self._known.get(grammar)
        if known is None:
            return []
        known.asked.discard(replica_id)
        if known.asked and not isinstance(error, InvalidArgument):
            return []
        return self._release(known)

    def lost(self, request: Request) -> None:
        """The replica of a request has not got its grammar any more."""
        grammar, replica_id = request.sampling.grammar, request.replica_id
        assert grammar is not None
        if replica_id is not None:
            self._known[grammar].ready.discard(replica_id)

    def attach(self, replica_id: str, ask: Ask) -> None:
        """A replica is there: it is asked for every grammar that a live request has."""
        self._replicas[replica_id] = ask
        for grammar, known in list(self._known.items()):
            self._ask_all(grammar, known)

    def detach(self, replica_id: str) -> list[Grammar]:
        """A replica is gone; returns the grammars that nobody has any more."""
        self._replicas.pop(replica_id, None)
        orphaned = []
        for grammar, known in self._known.items():
            known.asked.discard(replica_id)
            if replica_id in known.ready:
                known.ready.discard(replica_id)
                if not known.ready:
                    orphaned.append(grammar)
        return orphaned

    def _ask_all(self, grammar: Grammar, known: _Known) -> None:
        for replica_id, ask in self._replicas.items():
            if replica_id not in known.asked and replica_id not in known.ready:
                known.asked.add(replica_id)
                ask(grammar)

    def _release(self, known: _Known) -> list[Request]:
        return [request for request in list(known.waiting.values()) if self.remove(request)]
