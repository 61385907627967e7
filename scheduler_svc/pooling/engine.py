"""The engine of a pooling deployment: all requests and all replicas.

It is the counterpart of :mod:`scheduler_svc.dispatch.engine`. A request waits until a device is free, runs
once and ends. The requests of a lost replica wait again.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from protos.errors import (
    ContextExceeded,
    InvalidArgument,
    Overloaded,
    TriptychError,
    Unavailable,
)
from protos.steps import PoolShape, format_shapes
from protos.triptych.v1 import common_pb2
from protos.validation import check_ids
from scheduler_svc.dispatch.load import Load, ReplicaLoad, ReplicaMemory, Totals
from scheduler_svc.dispatch.queueing import MAX_REQUESTS, MAX_TOKENS, LiveRequests
from scheduler_svc.policy.order import OrderPolicy
from scheduler_svc.pooling.batching import PoolQueue
from scheduler_svc.pooling.scheduler import PoolScheduler
from scheduler_svc.pooling.stand_ins import NoAdapters, NoPrefixes, generates_nothing
from scheduler_svc.pooling.tasks import PooledModel
from scheduler_svc.replica.stats import Distribution
from scheduler_svc.replica.suspects import Detached, Loss, killed_too_many
from scheduler_svc.requests.request import Delivery, Event, Request, RequestState, Sink
from scheduler_svc.requests.sampling import FinishReason, Sampling, StopRule
from scheduler_svc.requests.trace import TraceContext, traceparent_of

_NO_SAMPLING: Final = Sampling(common_pb2.SamplingParams())
_NO_STOP: Final = StopRule.from_sampling(_NO_SAMPLING, frozenset(), max_tokens=0)


@dataclass(frozen=True, slots=True)
class PoolSubmission:
    """A pooling request that has passed every check that needs no model."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    pooling: common_pb2.PoolingParams
    priority: int = 0
    tenant: str = ""
    tracing: TraceContext | None = None
    """Where its spans belong; None: it is not traced."""


@dataclass(slots=True)
class PoolReplica:
    """A ready replica as the engine sees it."""

    scheduler: PoolScheduler
    wake: Callable[[], None]
    """Tells the replica's driver that there is work."""
    failing: Callable[[], bool] = lambda: False
    """Whether the worker's last step failed."""


class PoolEngine:
    """Enqueues requests, hands batches to free replicas and aborts requests."""

    def __init__(
        self, *, max_waiting: int, max_waiting_tokens: int, clock: Callable[[], float],
        make_order: Callable[[], OrderPolicy], max_worker_losses: int = 2, max_step_failures: int = 4,
    ) -> None:  # fmt: skip
        """Starts without replicas and without shapes.

        Args:
            max_waiting: requests that may wait at once.
            max_waiting_tokens: prompt tokens that may wait at once.
            clock: monotonic seconds.
            make_order: makes the policy that decides which waiting request is next.
            max_worker_losses: workers that may be lost in a row while they run the same request.
            max_step_failures: batches that may fail in a row with the same request in them.
        """
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._clock = clock
        self._make_order = make_order
        self._max_worker_losses = max_worker_losses
        self._max_step_failures = max_step_failures
        self._arrivals = itertools.count()
        self._live = LiveRequests()
        self._queue: PoolQueue | None = None
        self.replicas: dict[str, PoolReplica] = {}
        """Ready replicas by id."""
        self.model: PooledModel | None = None
        """Set once a replica has been ready."""
        self._suspended = False
        self.rejections: Counter[str] = Counter()
        """Requests that the queue refused, by the limit that they would have exceeded."""
        self.prefixes = NoPrefixes()
        self.adapters = NoAdapters()

    # ---- load ----

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a batch."""
        return len(self._queue) if self._queue else 0

    def load(self) -> Load:
        """Returns the current load of the ready replicas and the queue."""
        replicas = tuple(
            ReplicaLoad(name, replica.scheduler.num_running) for name, replica in self.replicas.items()
        )
        tokens = self._queue.backlog.num_tokens if self._queue else 0
        return Load(replicas, num_waiting=self.num_waiting, num_waiting_tokens=tokens)

    def totals(self) -> dict[str, Totals]:
        """Returns the counters of the ready replicas by id."""
        return {name: _totals_of(replica.scheduler) for name, replica in self.replicas.items()}

    def memory(self) -> dict[str, ReplicaMemory]:
        """Returns nothing: pooling replicas have no KV memory."""
        return {}

    # ---- requests ----

    @property
    def shapes(self) -> tuple[PoolShape, ...]:
        """The shapes of the deployment; empty before the first :meth:`serve`."""
        return self._queue.shapes if self._queue is not None else ()

    def serve(
        self, model: PooledModel, shapes: tuple[PoolShape, ...], *, padding_costs: bool = False
    ) -> None:
        """Accepts requests from now on; the first call fixes the shapes and how batches are chosen.

        Args:
            model: the served model.
            shapes: its static shapes.
            padding_costs: see `choose_batch`.
        """
        self.model = model
        if self._queue is None:
            self._queue = PoolQueue(shapes, self._make_order, padding_costs=padding_costs)

    def submit(self, submission: object, sink: Sink) -> None:
        """Refuses a generating request; see :class:`scheduler_svc.workers.engine_protocol.EngineProtocol`.

        Raises:
            Unsupported: always.
        """
        del submission, sink
        raise generates_nothing()

    def submit_pooling(self, submissions: Sequence[PoolSubmission], sink: Sink) -> None:
        """Enqueues all requests of a call, or none; the one event of each goes to `sink`.

        An empty queue takes a call of any size, because no later time would be better for it.

        Raises:
            Unavailable: no replica has been ready yet.
            InvalidArgument: an id is in use, or a token id cannot be served.
            Unsupported: the model does not serve what is asked of it.
            ContextExceeded: a prompt fits no shape.
            Overloaded: the queue has no room for all.
        """
        model, queue = self.model, self._queue
        if model is None or queue is None or self._suspended:
            raise Unavailable("no worker is ready yet; retry in a few seconds", retry_after_ms=2000)
        self._check_names(submissions)
        for submission in submissions:
            self._check(submission, model, queue)
        num_tokens = sum(len(submission.prompt_token_ids) for submission in submissions)
        most, most_tokens, backlog = self._max_waiting, self._max_waiting_tokens, queue.backlog
        too_many = len(queue) + len(submissions) > most
        is_full = len(queue) and (too_many or backlog.num_tokens + num_tokens > most_tokens)
        tenant = submissions[0].tenant
        if is_full and not backlog.has_share(tenant, len(submissions), num_tokens, most, most_tokens):
            self.rejections[MAX_REQUESTS if too_many else MAX_TOKENS] += len(submissions)
            raise Overloaded(
                f"{len(queue)} requests with {backlog.num_tokens} tokens are waiting; retry later",
                retry_after_ms=1000,
            )
        now_s = self._clock()
        for submission in submissions:
            request = self._make_request(submission, sink, now_s)
            self._live.add((request,))
            queue.add(request)
        self._wake_one()

    def _make_request(self, submission: PoolSubmission, sink: Sink, now_s: float) -> Request:
        trace = submission.tracing.begin(now_s) if submission.tracing is not None else None
        if trace is not None:
            trace.waits("queue", now_s)
        return Request(
            request_id=submission.request_id,
            token_ids=list(submission.prompt_token_ids),
            num_prompt_tokens=len(submission.prompt_token_ids),
            sampling=_NO_SAMPLING,
            arrival=next(self._arrivals),
            arrival_s=now_s,
            delivery=Delivery(accepted_s=now_s),
            sink=sink,
            stop=_NO_STOP,
            priority=submission.priority,
            tenant=submission.tenant,
            pooling=submission.pooling,
            trace=trace,
            traceparent=traceparent_of(submission.tracing, trace),
        )

    def find(self, request_id: str) -> Request | None:
        """Returns the live request with that id."""
        return next(iter(self._live.sequences_of(request_id)), None)

    def abort(self, request_id: str, sequence: int | None = None) -> bool:
        """Aborts a request in any state. Unknown and finished ids are no error.

        Args:
            request_id: the id of the request.
            sequence: ignored; a pooling request has one sequence.

        Returns:
            Whether a live request was found.
        """
        del sequence
        request = self.find(request_id)
        if request is None:
            return False
        self._stop(request, Event(request_id, finish_reason=FinishReason.ABORT))
        return True

    def live(self) -> list[Request]:
        """Returns every request that has not ended."""
        return list(self._live)

    def fail(self, request: Request, error: TriptychError) -> None:
        """Fails a live request in any state."""
        self._stop(request, Event(request.request_id, error=error))

    def _stop(self, request: Request, event: Event) -> None:
        """Ends a live request in any state with its last event."""
        if self._queue is not None and self._queue.remove(request):
            self._end(request, event)
        elif (replica := self.replicas.get(request.replica_id or "")) is not None:
            replica.scheduler.stop(request, event)

    def take(self, replica_id: str) -> tuple[PoolShape, list[Request]] | None:
        """Returns the next batch for a replica with a free device; None if no request waits."""
        now = self._clock()
        taken = (
            self._queue.take(now, lambda request: self._avoids(replica_id, request)) if self._queue else None
        )
        if taken is None:
            return None
        for request in taken[1]:
            request.replica_id = replica_id
            if request.trace is not None:
                request.trace.runs(now)
            if request.delivery.first_scheduled_s is None:
                request.delivery.first_scheduled_s = now
                self.replicas[replica_id].scheduler.stats.queue_s.observe(now - request.delivery.accepted_s)
        if self._queue:
            self._wake_one(but=replica_id)
        return taken

    def requeue(self, request: Request) -> None:
        """Lets a request wait again."""
        self._add(request)
        self._wake_idle()

    def _add(self, request: Request) -> None:
        assert self._queue is not None
        if request.trace is not None:
            request.trace.waits("queue", self._clock())
        self._queue.add(request)

    def is_hopeless(self, request: Request) -> bool:
        """Whether batches of the request alone have failed often enough, and on every replica."""
        return request.step_failures >= self._max_step_failures and not self._is_untried(request)

    def _is_untried(self, request: Request) -> bool:
        return not request.failed_on.issuperset(self.replicas)

    def _avoids(self, replica_id: str, request: Request) -> bool:
        """Returns whether the replica has failed the request, which can run on another one."""
        return replica_id in request.failed_on and self._is_untried(request)

    def forget(self, request: Request) -> None:
        """Forgets a request that has ended."""
        self._live.remove(request)

    def end_trace(self, request: Request, event: Event) -> None:
        """Writes the spans of a request, given its last event."""
        request.end_trace(event, self._clock())

    def dispatch(self) -> None:
        """Does nothing: free replicas take their batches themselves, see :meth:`take`."""

    def suspend(self, error: TriptychError) -> int:
        """Ends every waiting request with `error` and refuses new ones until a replica attaches.

        Returns how many ended.
        """
        self._suspended = True
        requests = self._queue.drain() if self._queue else []
        for request in requests:
            self._end(request, Event(request.request_id, error=error))
        return len(requests)

    def fail_oversized(self) -> int:
        """Does nothing: all replicas have the same shapes."""
        return 0

    # ---- replicas ----

    def make_scheduler(self, replica_id: str, model: PooledModel) -> PoolScheduler:
        """Returns the scheduler for a replica of `model` that will be attached."""
        return PoolScheduler(_Share(self, replica_id), model)

    def attach(self, replica_id: str, replica: PoolReplica) -> None:
        """Adds a ready replica; it may get requests at once."""
        self._suspended = False
        self.replicas[replica_id] = replica
        replica.wake()

    def detach(self, replica_id: str, loss: Loss) -> Detached:
        """Removes a replica; its requests wait again, in order of arrival.

        If the loss blames requests, those of the running batch are suspects. One that was alone in it fails
        if too many workers were lost with it.
        """
        replica = self.replicas.pop(replica_id, None)
        if replica is None:
            return Detached()
        abandoned = replica.scheduler.abandon(loss)
        failed = []
        for request in abandoned.requests:
            if request is abandoned.culprit and request.worker_losses >= self._max_worker_losses:
                self._end(request, Event(request.request_id, error=killed_too_many(request.worker_losses)))
                failed.append(request.request_id)
            else:
                self._add(request)
        self._wake_idle()
        suspects = tuple(request.request_id for request in abandoned.suspects)
        return Detached(len(abandoned.requests) - len(failed), suspects, tuple(failed))

    def _wake_idle(self) -> None:
        """Wakes all free replicas, because some may have to leave a waiting request to others."""
        for replica in self.replicas.values():
            if replica.scheduler.idle:
                replica.wake()

    def _wake_one(self, but: str = "") -> None:
        """Wakes a free replica; after taking its batch, it wakes the next one if requests still wait.

        A failing replica is the last choice. It is free soon after each batch, which it fails.
        """
        free = [
            replica
            for replica_id, replica in self.replicas.items()
            if replica.scheduler.idle and replica_id != but
        ]
        if free:
            min(free, key=lambda replica: replica.failing()).wake()

    def _end(self, request: Request, event: Event) -> None:
        request.state = RequestState.FINISHED
        self.forget(request)
        request.end_trace(event, self._clock())
        request.sink.push(event)

    def _check_names(self, submissions: Sequence[PoolSubmission]) -> None:
        seen: set[str] = set()
        for name in (submission.request_id for submission in submissions):
            if name in seen or self._live.in_use(name, (name,)):
                raise InvalidArgument(
                    f"request id {name!r} is in use; ids must be unique", param="request_id"
                )
            seen.add(name)

    def _check(self, submission: PoolSubmission, model: PooledModel, queue: PoolQueue) -> None:
        model.check(submission.pooling)
        check_ids("prompt_token_ids", submission.prompt_token_ids, model.vocab_size)
        count = len(submission.prompt_token_ids)
        if queue.fit(count) is None:
            raise ContextExceeded(
                f"the prompt has {count} tokens and fits none of the shapes {format_shapes(queue.shapes)}; "
                f"shorten it to at most {queue.shapes[-1].prompt_len} tokens",
                param="prompt",
            )


@dataclass(frozen=True, slots=True)
class _Share:
    """The engine as one replica sees it."""

    engine: PoolEngine
    replica_id: str

    def take(self) -> tuple[PoolShape, list[Request]] | None:
        """Returns the next batch for this replica."""
        return self.engine.take(self.replica_id)

    def requeue(self, request: Request) -> None:
        """Lets a request wait again."""
        self.engine.requeue(request)

    def is_hopeless(self, request: Request) -> bool:
        """Whether batches of the request alone have failed often enough, and on every replica."""
        return self.engine.is_hopeless(request)

    def forget(self, request: Request) -> None:
        """Forgets a request that has ended."""
        self.engine.forget(request)

    def end_trace(self, request: Request, event: Event) -> None:
        """Writes the spans of a request, given its last event."""
        self.engine.end_trace(request, event)


def _totals_of(scheduler: PoolScheduler) -> Totals:
    stats = scheduler.stats
    counts: dict[tuple[str, ...], float] = {
        ("vllm:prompt_tokens",): stats.tokens.total(),
        ("triptych:late_graphs",): stats.report.late_graphs,
    }
    for shape, batches in stats.batches.items():
        name = str(shape)
        rows, tokens = stats.rows[shape], stats.tokens[shape]
        counts["triptych:pool_batches", name] = batches
        counts["triptych:pool_rows", name] = rows
        counts["triptych:pool_padding_rows", name] = 0 if shape.packed else batches * shape.batch - rows
        counts["triptych:pool_tokens", name] = tokens
        counts["triptych:pool_padding_tokens", name] = batches * shape.num_tokens - tokens
    times: dict[tuple[str, ...], Distribution] = {
        ("triptych:step_seconds", "pool", str(shape)): seconds for shape, seconds in stats.seconds.items()
    }
    return Totals(counts, {("vllm:request_queue_time_seconds",): stats.queue_s, **times}, report=stats.report)
