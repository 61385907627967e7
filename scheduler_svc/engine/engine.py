"""The engine of a deployment: all requests, all replicas, and the dispatch of requests to replicas.

Runs on the thread of one event loop; no method waits. A waiting request belongs to no replica. It goes to a
replica with a free slot and enough memory, preferably to a cached prefix; a pooling request goes to a free
device or joins a batch there. The requests of a lost replica wait again.
"""

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Final

from protos.errors import Internal, InvalidArgument, Overloaded, TriptychError, Unavailable
from protos.service.logs import get_logger
from scheduler_svc.adapters.registry import Adapter
from scheduler_svc.engine.adapter_control import AdapterControl
from scheduler_svc.engine.load import Load, ReplicaLoad, Totals, totals_of
from scheduler_svc.engine.placement import AttachedReplica, Placer
from scheduler_svc.engine.prefix_control import PrefixControl
from scheduler_svc.engine.waiting import Capacity, LiveRequests, Queues
from scheduler_svc.kv.cache import KvCache
from scheduler_svc.policy.order import PriorityFairOrder
from scheduler_svc.replica.quarantine import DetachReport, EvictedRequests, Loss, killed_too_many
from scheduler_svc.requests.admission import ModelLimits, Submission, make_requests
from scheduler_svc.requests.pooled_model import PooledModel
from scheduler_svc.requests.request import Event, Request, Sink
from scheduler_svc.requests.sampling import FinishReason, Grammar, StopRule

MOST_GRAMMAR_LOSSES: Final = 32
"""Admissions in a row that fail because the worker has evicted the compiled grammar."""

RECLAIM_AFTER_S: Final = 1.0
"""Seconds before the next request may preempt another tenant's, and between two such preemptions. Most places
become free sooner by themselves."""


class Engine:
    """Enqueues requests, dispatches them to replicas and aborts them."""

    def __init__(
        self, *, max_waiting: int, max_waiting_tokens: int, clock: Callable[[], float], order: PriorityFairOrder,
        max_worker_losses: int = 2, max_step_failures: int = 4,
        expected_adapters: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Starts without replicas.

        Args:
            max_waiting: limit of waiting requests.
            max_waiting_tokens: limit of waiting prompt tokens.
            clock: monotonic seconds.
            order: the order of waiting requests.
            max_worker_losses: workers lost in a row with the same request before it fails.
            max_step_failures: failed steps in a row with the same request before it fails.
            expected_adapters: names of LoRA adapters in the settings.
        """
        self._clock = clock
        self._arrivals = itertools.count()
        self._max_worker_losses = max_worker_losses
        self._max_step_failures = max_step_failures
        self._live = LiveRequests()
        self._capacity = Capacity(max_waiting, max_waiting_tokens)
        self.rejections = self._capacity.rejections
        """Requests refused by the queue, by exceeded limit."""
        # The head of the queue after it found no room. Dispatch stops there until something is released.
        self._blocked: Request | None = None
        # Next time at which a tenant far below its share may preempt others.
        self._next_reclaim_s = clock()
        # Whether skipped requests may find room now.
        self._retry_skipped = False
        self._order = order
        self._queues = Queues(order, clock)
        self.waiting = self._queues.waiting
        """Requests waiting for a slot."""
        self.grammars = self._queues.grammars
        """Requests waiting for their grammar."""
        self._placer = Placer(self.grammars, clock)
        self.replicas = self._placer.replicas
        """Ready replicas by id."""
        self.adapters = AdapterControl(
            self.replicas, self._queues, expected_adapters, clock=clock, fail=self._fail, released=self.released,
            dispatch=self.dispatch,
        )  # fmt: skip
        """The LoRA adapters of the deployment."""
        self.prefixes = PrefixControl(self.replicas, self.dispatch)
        self.model: ModelLimits | PooledModel | None = None
        """Set by the first ready replica."""
        self._suspended = False
        self._log = get_logger()

    # ---- load ----

    @property
    def num_running(self) -> int:
        """Requests with a slot, over all replicas."""
        return sum(replica.scheduler.num_running for replica in self.replicas.values())

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return self.waiting.tenants.num_requests

    def load(self) -> Load:
        """Returns the current load of the ready replicas and the queues."""
        schedulers = {name: replica.scheduler for name, replica in self.replicas.items()}
        replicas = tuple(
            ReplicaLoad(name, one.num_running, 0.0 if one.kv is None else one.kv.usage)
            for name, one in schedulers.items()
        )
        tenants = self.waiting.tenants
        deferred = tenants.num_requests - len(self.waiting)
        return Load(replicas, tenants.num_requests, deferred, tenants.num_tokens)

    def totals(self) -> dict[str, Totals]:
        """Returns the counters of the ready replicas by id."""
        return {name: totals_of(replica.scheduler) for name, replica in self.replicas.items()}

    def caches(self) -> dict[str, KvCache]:
        """Returns the KV memory of the ready replicas by id, without pooling replicas."""
        found = ((name, replica.scheduler.kv) for name, replica in self.replicas.items())
        return {name: kv for name, kv in found if kv is not None}

    # ---- requests ----

    def submit(self, submission: Submission, sink: Sink) -> None:
        """Enqueues a single request; see :meth:`submit_all`."""
        self.submit_all((submission,), sink)

    def submit_all(self, submissions: Sequence[Submission], sink: Sink) -> None:
        """Enqueues all requests of a call, or none; their events go to `sink`.

        Raises:
            Unavailable: no replica is ready yet.
            InvalidArgument: an id is in use, or a token id, parameter or length cannot be served.
            NotFound: no adapter has the requested name.
            Unsupported: the model does not support a requested feature.
            Overloaded: the queue lacks room for all requests.
        """
        if self.model is None:
            raise _no_worker()
        self._abort_failed()
        checked, names = [], set[str]()
        for submission in submissions:
            ids = {submission.sequence_id(sequence) for sequence in submission.sequences}
            if submission.request_id in names or self._live.in_use(submission.request_id, ids):
                raise InvalidArgument(
                    f"request id {submission.request_id!r} is in use; ids must be unique", param="request_id"
                )
            names.add(submission.request_id)
            checked.append((submission, *self._check(submission, self.model)))
        if self._suspended:
            raise _no_worker()
        self._capacity.check(submissions, self.waiting.tenants)
        now_s = self._clock()
        for submission, stop, adapter in checked:
            requests = make_requests(submission, stop, sink, self._arrivals, now_s, adapter)
            for event in submission.ended(stop):
                sink.push(event)
            self._live.add(requests)
            for request in requests:
                request.rank = self._order.rank(request)
                self.grammars.add_user(request)
                self.adapters.add_user(request)
                self.requeue(request)
        self.dispatch()

    def _check(
        self, submission: Submission, model: ModelLimits | PooledModel
    ) -> tuple[StopRule, Adapter | None]:
        """Checks a submission; returns its stop rule and its adapter."""
        adapter = self.adapters.resolve(submission.lora_name, submission.lora_digest)
        stop = model.check(submission, self._capacity.max_request_tokens)
        if adapter is not None:
            self.adapters.check_size(adapter, len(submission.prompt_token_ids) + stop.max_tokens)
        return stop, adapter

    def abort(self, request_id: str, sequence: int | None = None) -> bool:
        """Aborts a request in any state, or one of its sequences.

        Returns:
            Whether a live sequence was found; unknown and finished ids are no error.
        """
        found = [one for one in self._live.sequences_of(request_id) if sequence in (None, one.sequence)]
        for request in found:
            self._stop(request, _aborted(request))
        if found:
            self.dispatch()
        return bool(found)

    def live(self) -> list[Request]:
        """Returns every unfinished sequence."""
        return list(self._live)

    def fail(self, request: Request, error: TriptychError) -> None:
        """Fails a live request in any state, with the other sequences of its group."""
        self._stop(request, Event(request.request_id, error=error))
        self.dispatch()

    def _stop(self, request: Request, event: Event) -> None:
        """Ends a live request in any state with its last event."""
        if self._queues.remove(request):
            self.released()  # later requests may run now
            self._end(request, event)
            return
        if (replica := self.replicas.get(request.replica_id or "")) is not None:
            replica.scheduler.stop(request, event)
            replica.wake()

    def _abort_failed(self) -> None:
        """Aborts the remaining sequences of failed requests, outside of the step with the failure."""
        for request in self._live.take_failed():
            self._stop(request, _aborted(request))

    def find(self, request_id: str) -> Request | None:
        """Returns a live request by id, or the first of its sequences."""
        return next(iter(self._live.sequences_of(request_id)), None)

    def suspend(self, error: TriptychError) -> int:
        """Ends every waiting request with `error` and refuses new ones until a replica attaches.

        Returns how many ended.
        """
        self._suspended = True
        requests = list(self._queues)
        for request in requests:
            self._fail(request, error)
        return len(requests)

    def _fail(self, request: Request, error: TriptychError) -> None:
        """Ends a request without a slot."""
        self._queues.remove(request)
        self._end(request, Event(request.request_id, error=error))

    def _end(self, request: Request, event: Event) -> None:
        request.finish(event, self._clock())
        self.forget(request)

    # ---- dispatch ----

    def dispatch(self) -> None:
        """Places waiting requests on replicas, in order, while there is room for the next.

        Call it whenever there may be room; without room it costs next to nothing.
        """
        if self._live.failed:
            self._abort_failed()
        now = self._clock()
        may_reclaim = bool(self.waiting) and now >= self._next_reclaim_s
        if may_reclaim:
            self._next_reclaim_s = now + RECLAIM_AFTER_S
            self.released()
        if self._retry_skipped:
            self._retry_skipped = False
            self._placer.clear_claims()
            self.waiting.bring_back()
        while self.waiting and (head := self.waiting.peek(now)) is not None:
            if self._blocked is head:
                return
            try:
                settled = self._placer.settle(head)
                if not settled and may_reclaim and now >= head.waits_since_s + RECLAIM_AFTER_S:
                    may_reclaim = False
                    running = {one.tenant for one in self._live if one.slot is not None}
                    settled = self._placer.reclaim(head, self.waiting.tenants.shares(running))
            except Exception as error:  # noqa: BLE001 - any bug
                # Fail this request only. Otherwise every replica in turn would meet it and be lost.
                self._log.exception("placing_failed", request=head.request_id)
                message = f"placing the request failed: {type(error).__name__}: {error}"
                self._fail(head, error if isinstance(error, TriptychError) else Internal(message))
                continue
            if settled:
                self._queues.settled(head)
                self.adapters.placed(head)
                # An adapter in a slot also serves requests of other groups.
                self.waiting.bring_back(None if head.adapter else self._placer.group_of(head))
                continue
            self.adapters.want(head, stuck=True)
            if self._placer.skip(head):
                self.waiting.skip(head, self._placer.group_of(head))
            else:
                self._blocked = head
                return

    # ---- calls from replicas, see ReplicaOwner ----

    def requeue(self, request: Request) -> None:
        """Enqueues a live request: for its grammar, its adapter or a slot."""
        self._queues.add(request)
        self.adapters.want(request)

    def without_grammar(self, request: Request) -> None:
        """Requeues a request after its replica evicted its grammar; fails it after too many evictions."""
        orphaned = self.grammars.evicted(request)
        assert request.sampling.grammar is not None
        self._regroup(request.sampling.grammar)
        if request.grammar_lost_at != len(request.token_ids):
            request.grammar_lost_at, request.num_grammar_losses = len(request.token_ids), 0
        request.num_grammar_losses += 1
        if request.num_grammar_losses < MOST_GRAMMAR_LOSSES:
            self.requeue(request)
        else:
            self._fail(request, _no_grammar())
        self._wait_for_recompilation(orphaned)

    def forget(self, request: Request) -> None:
        """Forgets a finished request."""
        self._placer.ended(request)
        self._queues.remove_user(request)
        self.adapters.remove_user(request)
        self._live.remove(request)

    def is_hopeless(self, request: Request) -> bool:
        """Whether steps of the request alone failed too often, and on every replica able to run it."""
        return request.step_failures >= self._max_step_failures and not self._placer.is_untried(request)

    def admitted(self, request: Request) -> None:
        """Charges the tenant of a request with a new slot, once: recomputed tokens are free."""
        self._queues.undefer(request)
        self.grammars.started(request)
        if not request.charged:
            request.charged = True
            self.charge(request.tenant, len(request.token_ids) - request.kv.num_computed)

    def charge(self, tenant: str, tokens: int) -> None:
        """Charges a tenant for tokens."""
        self.waiting.tenants.charge(tenant, tokens)

    def released(self) -> None:
        """Records freed slots, blocks or room in a plan; the next dispatch retries the queue."""
        self._blocked = None
        self._retry_skipped = True

    # ---- replicas ----

    def attach(self, replica_id: str, replica: AttachedReplica) -> None:
        """Adds a ready replica, which may get requests at once."""
        self._suspended = False
        replica.replica_id = replica_id
        self.replicas[replica_id] = replica
        self.prefixes.attached(replica_id)
        self._replicas_changed()
        self.grammars.attach(replica_id, replica.ask, replica.withdraw)
        self.adapters.attached(replica)
        self.dispatch()
        replica.wake()

    def detach(self, replica_id: str, loss: Loss) -> DetachReport:
        """Removes a replica; its requests wait again and keep their tokens.

        If the loss blames requests, those in unanswered steps become suspects. A request alone in them fails
        if too many workers were lost with it.
        """
        replica = self.replicas.pop(replica_id, None)
        if replica is None:
            return DetachReport()
        self._wait_for_recompilation(self.grammars.detach(replica_id))
        self.adapters.detached(replica_id)
        abandoned = replica.scheduler.abandon(loss)
        for request in abandoned.requests:
            self.requeue(request)
        failed = self._judge(abandoned)
        if replica.scheduler.kv is not None:
            replica.scheduler.kv.events.close()
        self._replicas_changed()
        self.dispatch()
        suspects = tuple(request.request_id for request in abandoned.suspects)
        return DetachReport(len(abandoned.requests) - len(failed), suspects, failed)

    def _judge(self, abandoned: EvictedRequests) -> tuple[str, ...]:
        """Fails a request that killed too many workers, and notifies the clients of other suspects.

        Returns the ids of failed requests.
        """
        failed = []
        for request in abandoned.suspects:
            losses = request.worker_losses
            if request is abandoned.culprit and losses >= self._max_worker_losses:
                self._fail(request, killed_too_many(losses))
                failed.append(request.request_id)
            else:
                request.sink.push(Event(request.request_id, worker_losses=losses))
        return tuple(failed)

    def _replicas_changed(self) -> None:
        """Recomputes the limits and retries skipped requests."""
        self.released()
        self.waiting.bring_all_back()
        if self.replicas:
            length = self.model.max_model_len if self.model else 0
            self._capacity.measure((replica.scheduler for replica in self.replicas.values()), length)

    def fail_oversized(self) -> int:
        """Fails waiting requests too large for every replica, after the loss of a larger replica.

        Requests with LoRA adapters also fail if no remaining replica can run them. Returns how many failed.
        """
        if not self.replicas:
            return 0
        stranded = [one for one in self._queues if one.adapter and not self._placer.has_prospects(one)]
        for request in stranded:
            message = "no remaining worker runs the request's LoRA adapter; send it again when one is back"
            self._fail(request, Unavailable(message, retry_after_ms=5000))
        schedulers = [replica.scheduler for replica in self.replicas.values()]
        oversized = [one for one in self._queues if not any(each.fits(one) for each in schedulers)]
        for request in oversized:
            message = (
                f"the request needs {request.end} tokens of KV memory and the remaining workers hold"
                f" {self._capacity.max_request_tokens}; send it again when more workers are back"
            )
            self._fail(request, Unavailable(message, retry_after_ms=5000))
        return len(oversized) + len(stranded)

    # ---- grammars ----

    def grammar_compiled(self, replica_id: str, grammar: Grammar) -> None:
        """Records a grammar compiled by a replica; its waiting requests may run there."""
        self._queues.wait(*self.grammars.compiled(replica_id, grammar))
        self._regroup(grammar)
        self._fail_stranded(grammar)
        self.released()
        self.dispatch()

    def grammar_refused(self, replica_id: str, grammar: Grammar, error: TriptychError) -> None:
        """Records a failed compilation; fails the grammar's requests unless another replica may succeed."""
        for request in self.grammars.refused(replica_id, grammar, error):
            self._fail(request, error)
        self._fail_stranded(grammar)
        self.released()
        self.dispatch()

    def _fail_stranded(self, grammar: Grammar) -> None:
        """Fails requests too large for every replica that holds or compiles the grammar."""
        for request in self.grammars.waiting_users(grammar):
            if not self._placer.has_prospects(request):
                message = (
                    "no worker that is large enough for the request could compile its grammar; retry later"
                )
                self._fail(request, Overloaded(message, param="structured_output", retry_after_ms=5000))

    def _wait_for_recompilation(self, orphaned: Collection[Grammar]) -> None:
        """Moves requests without a replica for their grammar out of the waiting queue."""
        for request in itertools.chain.from_iterable(map(self.grammars.waiting_users, orphaned)):
            if self.waiting.remove(request):
                self.requeue(request)

    def _regroup(self, grammar: Grammar) -> None:
        """Retries the skipped requests of a grammar after its set of replicas changed."""
        for request in self.grammars.waiting_users(grammar):
            self.waiting.unskip(request)


def _aborted(request: Request) -> Event:
    return Event(request.request_id, finish_reason=FinishReason.ABORT)


def _no_grammar() -> Overloaded:
    return Overloaded(
        f"workers evicted the grammar {MOST_GRAMMAR_LOSSES} times before the request could run; retry later,"
        " or raise --grammar-cache-mib",
        param="structured_output", retry_after_ms=5000,
    )  # fmt: skip


def _no_worker() -> Unavailable:
    return Unavailable("no worker is ready yet; retry in a few seconds", retry_after_ms=2000)
