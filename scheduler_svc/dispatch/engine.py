"""All requests and all replicas: what the outside submits to, and who gives waiting requests to replicas.

Runs on one event loop's thread; nothing but :meth:`Engine.drained` waits. A request belongs to nobody while it waits: whoever has a free slot,
the memory and, best of all, its prefix gets it, and a lost replica's requests simply wait again.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Collection

from protos.errors import ContextExceeded, InvalidArgument, Overloaded, TriptychError, Unavailable
from scheduler_svc.dispatch.grammar_queue import GrammarDesk
from scheduler_svc.dispatch.pinned_prefixes import PinnedPrefixes
from scheduler_svc.dispatch.placement import AttachedReplica, Placer
from scheduler_svc.dispatch.waiting_queue import WaitingQueue
from scheduler_svc.policy.order import OrderPolicy
from scheduler_svc.policy.placement import PlacementPolicy, PrefixAndLoad
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.requests.admission import ServedModel, Submission, check, requests_of
from scheduler_svc.requests.request import Event, FinishReason, Request, RequestState, SequenceGroup, Sink
from scheduler_svc.requests.sampling import Grammar
from scheduler_svc.requests.sequence_group import MAX_SEQUENCES, SEQUENCES_PER_SLOT


class Engine:
    """Admits, queues, places, aborts; knows every live request by id.

    Attributes:
        waiting: requests without a slot that nobody computes anything for.
        grammars: requests that wait for their grammar.
        pinned: prefixes that are kept.
        replicas: ready replicas by id.
        attach_listeners: told the id of every replica that is added.
        model: set when the first replica is ready.
    """

    def __init__(
        self, *, max_waiting: int, max_waiting_tokens: int, clock: Callable[[], float], order: OrderPolicy,
        placement: PlacementPolicy | None = None, max_pinned_share: float = 0.5,
    ) -> None:  # fmt: skip
        """Starts without replicas.

        Args:
            max_waiting: requests that may wait at once.
            max_waiting_tokens: prompt tokens that may wait at once.
            clock: monotonic seconds.
            order: whose turn it is.
            placement: who gets it.
            max_pinned_share: of each KV group's blocks, how much all pinned prefixes of a replica together may hold.
        """
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._clock = clock
        self._arrivals = itertools.count()
        # By their own ids; sequences of a group are also found by the client's id of the request.
        self._live: dict[str, Request] = {}
        self._groups: dict[str, SequenceGroup] = {}
        # One of their sequences failed; the others end before anything else is decided.
        self._failed: list[SequenceGroup] = []
        self._empty: asyncio.Event | None = None
        # Slots of all replicas; those of the last ones while there is none.
        self._num_slots = 0
        # Longest sequence that fits some replica's KV memory; that of the last ones while there is none.
        self._max_request_tokens = 0
        # Whose turn it was when there was no room, as long as nothing has been released since.
        self._blocked: Request | None = None
        self.waiting = WaitingQueue(order)
        self.grammars = GrammarDesk()
        self.pinned = PinnedPrefixes(max_pinned_share)
        self._placer = Placer(placement or PrefixAndLoad(), self.grammars, self.pinned)
        # Whether who is aside may find room now.
        self._look_aside = False
        self.replicas = self._placer.replicas
        self.attach_listeners: list[Callable[[str], None]] = []
        self.model: ServedModel | None = None

    @property
    def num_running(self) -> int:
        """Requests that have a slot, over all replicas."""
        return sum(replica.scheduler.num_running for replica in self.replicas.values())

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        deferred = sum(replica.scheduler.num_deferred for replica in self.replicas.values())
        return len(self.waiting) + len(self.grammars) + deferred

    # ---- requests ------------------------------------------------------------------------------------------------------------------

    def submit(self, submission: Submission, sink: Sink) -> None:
        """Queues a request; its events go to ``sink``.

        Raises:
            Unavailable: no replica has been ready yet.
            InvalidArgument: the id is in use, or a token id, parameter or length cannot be served.
            Overloaded: the queue is full.
        """
        model = self.model
        if model is None:
            raise Unavailable("no worker is ready yet; retry in a few seconds", retry_after_ms=2000)
        self._end_failed()
        names = [submission.name(sequence) for sequence in submission.sequences]
        if submission.request_id in self._groups or not self._live.keys().isdisjoint(names):
            raise InvalidArgument(
                f"request id {submission.request_id!r} is in use; ids must be unique", param="request_id"
            )
        max_tokens = check(submission, model, self._max_request_tokens)
        self._check_room(submission)
        requests = requests_of(submission, model, max_tokens, sink, self._arrivals, self._clock())
        if (group := requests[0].group) is not None:
            self._groups[group.request_id] = group
        for sequence in submission.complete(max_tokens):
            sink.push(Event(submission.request_id, sequence=sequence, finish_reason=FinishReason.LENGTH))
        for request in requests:
            request.rank = self.waiting.rank(request)
            self._live[request.request_id] = request
            self.grammars.arrive(request)
            self.requeue(request)
        self.dispatch()

    def _check_room(self, submission: Submission) -> None:
        """Refuses what the queue does not hold, now or ever."""
        sequences, num_prompt = submission.sequences, len(submission.prompt_token_ids)
        num_waiting, count = self.num_waiting, len(sequences)
        num_tokens = count * num_prompt + sum(map(len, sequences.values()))
        limit = min(MAX_SEQUENCES, self._max_waiting)
        if not submission.resumed:
            # What was accepted before was so when there were more replicas, perhaps.
            limit = min(limit, SEQUENCES_PER_SLOT * self._num_slots)
        if count > limit:
            raise InvalidArgument(
                f"n must be at most {limit} here, not {count}; send several requests", param="n"
            )
        if count > 1 and count * num_prompt > self._max_waiting_tokens:
            raise InvalidArgument(
                f"{count} sequences of {num_prompt} prompt tokens are more than the {self._max_waiting_tokens} tokens that may wait; "
                "send several requests with a smaller n",
                param="n",
            )
        tokens_waiting = self.waiting.num_tokens + self.grammars.num_tokens
        if num_waiting + count > self._max_waiting or (
            tokens_waiting and tokens_waiting + num_tokens > self._max_waiting_tokens
        ):
            raise Overloaded(
                f"{num_waiting} requests with {tokens_waiting} tokens are waiting; retry later",
                retry_after_ms=1000,
            )

    def abort(self, request_id: str, sequence: int | None = None) -> bool:
        """Ends a request, wherever it is, or one of its sequences alone. Unknown and finished ids are no error.

        Returns:
            Whether anything live was found.
        """
        found = [one for one in self._requests_of(request_id) if sequence in (None, one.sequence)]
        for request in found:
            self._abort(request)
        if found:
            self.dispatch()
        return bool(found)

    def _requests_of(self, request_id: str) -> list[Request]:
        """All live sequences of what a client calls ``request_id``."""
        if request_id in self._groups:
            return list(self._groups[request_id].members)
        request = self._live.get(request_id)
        return [] if request is None or request.group is not None else [request]

    def _abort(self, request: Request) -> None:
        if self.waiting.remove(request) or self.grammars.remove(request):
            self.released()  # it may have kept others waiting
            self._end(request, Event(request.request_id, finish_reason=FinishReason.ABORT))
            return
        if (replica := self.replicas.get(request.replica_id or "")) is not None:
            replica.scheduler.abort(request)
            replica.wake()

    def _end_failed(self) -> None:
        """Ends what is left of requests of which a sequence failed. Not at once: a replica was in the middle of its step then."""
        while self._failed:
            for request in list(self._failed.pop().members):
                self._abort(request)

    def find(self, request_id: str) -> Request | None:
        """The request with that id, if it waits or runs; the first of its sequences if it has several."""
        return next(iter(self._requests_of(request_id)), None)

    def dispatch(self) -> None:
        """Gives waiting requests to replicas, in order, as long as there is room for the next one.

        Call it whenever there may be: it costs next to nothing if there is not.
        """
        self._end_failed()
        if self._look_aside:
            self._look_aside = False
            self._placer.claim_nothing()
            self.waiting.bring_back()
        while self.waiting and (head := self.waiting.peek(self._clock())) is not None:
            if self._blocked is head:
                return
            if self._placer.settle(head):
                self.waiting.remove(head)
                self.waiting.bring_back(self._placer.alike(head))
            elif self._placer.step_aside(head):
                self.waiting.put_aside(head, self._placer.alike(head))
            else:
                self._blocked = head
                return

    def requeue(self, request: Request) -> None:
        """A live request waits: first for its grammar, if it has one that nobody has compiled, then for its turn; see ``Owner``."""
        if not self.grammars.hold(request):
            self._wait(request)

    def without_grammar(self, request: Request) -> None:
        """See ``Owner``."""
        orphaned = self.grammars.lost(request)
        self.requeue(request)
        self._recompile(orphaned)

    def charge(self, tenant: str, tokens: int) -> None:
        """See ``Owner``."""
        self.waiting.charge(tenant, tokens)

    def released(self) -> None:
        """See ``Owner``."""
        self._blocked = None
        self._look_aside = True

    def _wait(self, *requests: Request) -> None:
        """They take their places in the queue."""
        for request in requests:
            request.state = RequestState.WAITING
            self.waiting.add(request)

    def _recompile(self, orphaned: Collection[Grammar]) -> None:
        """Nobody has these grammars any more: who is queued for its turn waits for its grammar again, and keeps nobody from running."""
        if not orphaned:
            return
        for request in [one for one in self.waiting if one.sampling.grammar in orphaned]:
            self.waiting.remove(request)
            self.requeue(request)

    # ---- replicas ------------------------------------------------------------------------------------------------------------------

    def attach(self, replica_id: str, replica: AttachedReplica) -> None:
        """Adds a ready replica; it may get requests at once."""
        self.replicas[replica_id] = replica
        for listener in self.attach_listeners:
            listener(replica_id)
        self._replicas_changed()
        self.grammars.attach(replica_id, replica.ask, replica.withdraw)
        self.dispatch()
        replica.wake()

    def detach(self, replica_id: str) -> int:
        """Removes a replica that is lost or going; its requests wait again with the tokens they have.

        Returns:
            How many requests were put back.
        """
        replica = self.replicas.pop(replica_id, None)
        if replica is None:
            return 0
        self.pinned.lost(replica_id)
        self._recompile(self.grammars.detach(replica_id))
        requests = replica.scheduler.abandon()
        for request in requests:
            self.requeue(request)
        replica.scheduler.kv.events.close()
        self._replicas_changed()
        self.dispatch()
        return len(requests)

    # ---- grammars ------------------------------------------------------------------------------------------------------------------

    def grammar_compiled(self, replica_id: str, grammar: Grammar) -> None:
        """A replica has a grammar: who waited for it may run there."""
        self._wait(*self.grammars.compiled(replica_id, grammar))
        self._end_stranded(grammar)
        self.released()
        self.dispatch()

    def grammar_refused(self, replica_id: str, grammar: Grammar, error: TriptychError) -> None:
        """A replica will not have a grammar: the end of who waited for it, unless another one may."""
        for request in self.grammars.refused(replica_id, grammar, error):
            self._fail(request, error)
        self._end_stranded(grammar)
        self.released()
        self.dispatch()

    def _end_stranded(self, grammar: Grammar) -> None:
        """Ends who is too large for all replicas that have its grammar or may have it."""
        for request in [*self.waiting, *self.grammars]:
            if request.sampling.grammar == grammar and not self._placer.has_prospects(request):
                message = (
                    "no worker that is large enough for the request could compile its grammar; retry later"
                )
                self._fail(request, Overloaded(message, param="structured_output", retry_after_ms=5000))

    # ---- pinned prefixes -----------------------------------------------------------------------------------------------------------

    def check(self, submission: Submission) -> None:
        """Refuses what :meth:`submit` would refuse for what it is, and raises what that does."""
        if self.model is None:
            raise Unavailable("no worker is ready yet; retry in a few seconds", retry_after_ms=2000)
        check(submission, self.model, self._max_request_tokens)

    def pin(
        self, pin_id: str, replica_id: str, probe: Request, on_end: Callable[[], None] = lambda: None
    ) -> int:
        """See :meth:`PinnedPrefixes.pin`; a pin ends by :meth:`unpin`, or before if it has to.

        Raises:
            Unavailable: the replica is gone.
        """
        replica = self.replicas.get(replica_id)
        if replica is None:
            raise Unavailable("the replica that computed the prefix is gone; retry", retry_after_ms=1000)
        return self.pinned.pin(pin_id, replica_id, replica.scheduler, probe, on_end)

    def unpin(self, pin_id: str) -> bool:
        """Ends a pin; False if there is none of that id (any more)."""
        found = self.pinned.unpin(pin_id)
        if found:
            self.dispatch()
        return found

    def drop_pins(self, scheduler: ReplicaScheduler) -> bool:
        """See ``Owner``: a running request comes before what is kept for later ones."""
        return self.pinned.drop(scheduler)

    def reset_prefix_cache(self) -> int:
        """Forgets every cached prefix and pin; returns on how many replicas."""
        self.pinned.drop_all()
        for replica in self.replicas.values():
            replica.scheduler.kv.prefixes.reset()
        self.dispatch()
        return len(self.replicas)

    # ---- parts ---------------------------------------------------------------------------------------------------------------------

    def _replicas_changed(self) -> None:
        """Who is aside looks for room again. What fits the largest one, and the end of waiting requests that fit none any more."""
        self.released()
        self.waiting.bring_all_back()
        if not self.replicas:
            return
        self._num_slots = sum(replica.scheduler.geometry.max_num_seqs for replica in self.replicas.values())
        self._max_request_tokens = max(
            replica.scheduler.kv.max_tokens(self.model.max_model_len) if self.model else 0
            for replica in self.replicas.values()
        )
        for request in [*self.waiting, *self.grammars]:
            needed = request.num_prompt_tokens + request.sampling.max_tokens
            if needed <= self._max_request_tokens:
                continue
            message = f"the request needs {needed} tokens of KV memory and the workers that are left hold {self._max_request_tokens}"
            self._fail(request, ContextExceeded(message))

    def fail_waiting(self, error: TriptychError) -> int:
        """Ends every waiting request with ``error``; returns how many."""
        requests = [*self.waiting, *self.grammars]
        for request in requests:
            self._fail(request, error)
        return len(requests)

    async def drained(self, timeout_s: float) -> bool:
        """Waits until no request is live; False if some still are after ``timeout_s`` seconds."""
        if not self._live:
            return True
        self._empty = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        return not self._live

    def forget(self, request: Request) -> None:
        """Called by replicas when a request has ended."""
        self.grammars.leave(request)
        self._live.pop(request.request_id, None)
        group = request.group
        if group is not None:
            group.members.remove(request)
            if (group.failed or not group.members) and self._groups.get(group.request_id) is group:
                del self._groups[group.request_id]
                self._failed.append(group)
        if not self._live and self._empty is not None:
            self._empty.set()

    def _fail(self, request: Request, error: TriptychError) -> None:
        """Ends a request that has no slot."""
        _ = self.waiting.remove(request) or self.grammars.remove(request)
        self._end(request, Event(request.request_id, error=error))

    def _end(self, request: Request, event: Event) -> None:
        request.state = RequestState.FINISHED
        request.sink.push(event)
        self.forget(request)
