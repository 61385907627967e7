"""A replica of a pooling model: every step runs a batch of texts, padded to a static shape.

A request uses the shapes of the smallest prompt length that it fits into
(:mod:`scheduler_svc.shapes.shape_config`). Whenever the device is free, it runs the next request together
with as many others of the same prompt length as the chosen shape has rows for. A packed shape takes requests
of any length as long as their tokens fit. No request waits for a batch to fill, and only the first of a batch
leaves the queue before the batch is planned.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from protos.errors import Internal, InvalidArgument, NotFinite, TriptychError
from protos.steps import Pool, PoolShape, SlotOutput, StepPlan, StepResult
from protos.triptych.v1.worker_pb2 import WorkerReport
from protos.validation import count_values
from scheduler_svc.adapters.seats import AdapterSeats
from scheduler_svc.policy.learned_times import LearnedTimes
from scheduler_svc.replica.plans import admission_of
from scheduler_svc.replica.scheduler import ReplicaOwner
from scheduler_svc.replica.slots import AdmitResult
from scheduler_svc.replica.stats import STEP_SECONDS, Distribution
from scheduler_svc.replica.suspects import Abandoned, Loss
from scheduler_svc.requests.request import Event, Request, RequestState
from scheduler_svc.requests.sampling import FinishReason
from scheduler_svc.shapes.shape_config import PACKED_TOKENS

# The largest share of a batch's rows that may be padding: where a step takes about as long with few rows as
# with many, and where each row has its price.
_PADDING, _COSTLY_PADDING = 1 / 2, 1 / 8


def choose_batch(waiting: int, batches: Sequence[int], *, padding_costs: bool = False) -> int:
    """Returns the batch size that `waiting` requests fill best.

    This is the smallest batch that all of them fit into. If too many of its rows would be padding, the
    largest batch that they fill is better. If no batch is small enough or large enough, the nearest one is
    used.

    Args:
        waiting: number of requests, at least 1.
        batches: sizes to choose from, ascending; at least one.
        padding_costs: whether a row of padding takes as long as another one. It still is better than a step
            of less than half as many rows.
    """
    smaller = [batch for batch in batches if batch <= waiting]
    larger = [batch for batch in batches if batch > waiting]
    if not larger or (smaller and smaller[-1] == waiting):
        return smaller[-1]
    if not smaller:
        return larger[0]
    is_costly = padding_costs and 2 * smaller[-1] >= larger[0]
    room = larger[0] * (_COSTLY_PADDING if is_costly else _PADDING)
    return larger[0] if larger[0] - waiting <= room else smaller[-1]


class Waiting(Protocol):
    """The engine's waiting requests."""

    def __iter__(self) -> Iterator[Request]:
        """Yields every request, in no particular order."""

    def take(self, now: float, joins: Callable[[Request], bool | None]) -> None:
        """Removes the requests that `joins` accepts, in order; see :meth:`WaitingQueue.take`."""


class PoolOwner(ReplicaOwner, Protocol):
    """The calls of a pooling replica to the engine."""

    @property
    def waiting(self) -> Waiting:
        """Requests that wait for a batch."""


@dataclass(slots=True)
class PoolStats:
    """Counters from the start of a pooling replica."""

    batches: Counter[PoolShape] = field(default_factory=Counter)
    """Steps by shape."""
    rows: Counter[PoolShape] = field(default_factory=Counter)
    """Requests in these steps by shape; the other rows were padding."""
    tokens: Counter[PoolShape] = field(default_factory=Counter)
    """Prompt tokens in these steps by shape; the other tokens were padding."""
    seconds: dict[PoolShape, Distribution] = field(default_factory=dict)
    """The time that steps took on the worker, by shape."""
    queue_s: Distribution = field(default_factory=Distribution)
    """Seconds from a request's arrival until its first batch."""
    times: LearnedTimes = field(default_factory=LearnedTimes)
    """Seconds that a step takes."""
    not_finite: int = 0
    """Requests that failed because the model computed NaN or infinity."""
    report: WorkerReport = field(default_factory=WorkerReport)
    """What the worker reported last."""


class PoolScheduler:
    """Static batching. The engine places the first request of a batch, which then fills from the queue."""

    # A pooling replica has no KV memory, so nothing is shared there, deferred or preempted.
    kv = None
    num_deferred = prefill_backlog = 0
    least_urgent: int | None = None

    def __init__(
        self, shapes: Sequence[PoolShape], pooled_size: int, owner: PoolOwner, *, clock: Callable[[], float],
        padding_costs: bool = False,
    ) -> None:  # fmt: skip
        """Starts idle.

        Args:
            shapes: at least one; all are packed or none.
            pooled_size: values of one vector of the model.
            owner: has the waiting requests, and takes those that leave.
            clock: monotonic seconds.
            padding_costs: see `choose_batch`.
        """
        self.stats = PoolStats()
        """Counters."""
        self.adapters = AdapterSeats(0, 0, clock)
        """None: pooling models run no LoRA adapters."""
        self._shapes = sorted(shapes)
        self._pooled_size = pooled_size
        self._owner = owner
        self._clock = clock
        self._padding_costs = padding_costs
        self._step = 0
        self._plan: StepPlan | None = None
        # By slot: the running batch, or the first request of the next one. None after a request was aborted.
        self._batch: list[Request | None] = []
        # Slots of the last batch, which the worker still holds.
        self._held = 0

    # ---- state ----

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return sum(request is not None for request in self._batch)

    @property
    def is_busy(self) -> bool:
        """Whether requests are in the batch."""
        return self.num_running > 0

    @property
    def has_free_slot(self) -> bool:
        """Whether the next batch has no request yet."""
        return not self._batch

    @property
    def has_pending(self) -> bool:
        """Whether the result of a plan is outstanding."""
        return self._plan is not None

    def fits(self, request: Request) -> bool:
        """Whether a shape has room for the request."""
        return len(request.token_ids) <= self._shapes[-1].prompt_len

    def shares_prompt(self, request: Request) -> bool:
        """Returns False: a pooling request is one sequence."""
        del request
        return False

    def cached_tokens(self, request: Request) -> int:
        """Returns 0: nothing is cached."""
        del request
        return 0

    # ---- admitting and releasing requests ----

    def admit(self, request: Request) -> AdmitResult:
        """Makes a waiting request the first of the next batch."""
        if not self.has_free_slot:
            return AdmitResult.NO_ROOM
        self._add(request)
        return AdmitResult.ADMITTED

    def stop(self, request: Request, event: Event) -> None:
        """Ends a request of the batch with its last event; the result of its row will be dropped."""
        assert request.slot is not None
        self._batch[request.slot] = None
        if self._plan is None:
            self._batch.clear()
            self._owner.released()
        self._end(request, event)

    def abandon(self, loss: Loss) -> Abandoned:
        """Takes all requests off a lost replica; the loss may make suspects of those in a running batch."""
        batch, blames = self._batch, loss.blames and self.has_pending
        self._batch, self._plan = [], None
        requests = [request for request in batch if request is not None]
        for request in requests:
            request.slot, request.state = None, RequestState.WAITING
            request.worker_losses += blames
        alone = blames and len(batch) == len(requests) == 1
        return Abandoned(requests, requests if blames else [], requests[0] if alone else None)

    # ---- deciding ----

    def next_plan(self) -> StepPlan | None:
        """Fills the next batch from the queue; returns None while one runs, or if it has no first request."""
        if self._plan is not None or not self._batch:
            return None
        (first,) = self._batch
        assert first is not None
        if first.suspect:
            shape = self._smallest(len(first.token_ids), 1)
        else:
            shape = self._pack(first) if self._shapes[0].packed else self._fill_rows(first)
        batch = [request for request in self._batch if request is not None]
        self._step += 1
        self._plan = StepPlan(
            self._step,
            Pool(tuple(range(len(batch))), shape),
            release=tuple(range(self._held)),
            admit=tuple(map(admission_of, batch)),
        )
        self._held = len(batch)
        self.stats.batches[shape] += 1
        self.stats.rows[shape] += len(batch)
        self.stats.tokens[shape] += sum(len(request.token_ids) for request in batch)
        return self._plan

    def _smallest(self, num_tokens: int, num_texts: int) -> PoolShape:
        """Returns the smallest shape with so much room."""
        return next(
            shape for shape in self._shapes if shape.prompt_len >= num_tokens and shape.batch >= num_texts
        )

    def _fill_rows(self, first: Request) -> PoolShape:
        """Adds requests of the prompt length of the first one; returns the shape."""
        prompt_len = self._smallest(len(first.token_ids), 1).prompt_len
        shorter = max((s.prompt_len for s in self._shapes if s.prompt_len < prompt_len), default=0)
        sizes = [shape.batch for shape in self._shapes if shape.prompt_len == prompt_len]

        def suits(request: Request) -> bool:
            return shorter < len(request.token_ids) <= prompt_len and not request.suspect

        others = islice(filter(suits, self._owner.waiting), sizes[-1])
        size = choose_batch(1 + sum(1 for _ in others), sizes, padding_costs=self._padding_costs)

        def joins(request: Request) -> bool | None:
            if len(self._batch) == size:
                return None
            return suits(request) and self._add(request)

        self._owner.waiting.take(self._clock(), joins)
        return PoolShape(prompt_len, size)

    def _pack(self, first: Request) -> PoolShape:
        """Adds requests in turn until the next one does not fit; returns the shape.

        They fill a shape of at most `PACKED_TOKENS`, unless the first one needs a longer one.
        """
        total = len(first.token_ids)
        most = max(PACKED_TOKENS, self._smallest(total, 1).prompt_len)
        largest = [shape for shape in self._shapes if shape.prompt_len <= most][-1]

        def joins(request: Request) -> bool | None:
            nonlocal total
            if len(self._batch) == largest.batch:
                return None
            if request.suspect:
                return False
            if total + len(request.token_ids) > largest.prompt_len:
                return None
            total += len(request.token_ids)
            return self._add(request)

        self._owner.waiting.take(self._clock(), joins)
        return self._smallest(total, len(self._batch))

    def _add(self, request: Request) -> bool:
        """Adds a request to the batch; returns True."""
        now, delivery = self._clock(), request.delivery
        request.slot, request.state = len(self._batch), RequestState.PREFILLING
        if self._batch:
            assert self._batch[0] is not None
            request.replica_id = self._batch[0].replica_id
        self._batch.append(request)
        if request.trace is not None:
            request.trace.runs(now)
        if delivery.first_scheduled_s is None:
            delivery.first_scheduled_s = now
            self.stats.queue_s.observe(now - delivery.accepted_s)
        self._owner.admitted(request)
        return True

    def drain(self) -> None:
        """Does nothing: no batch depends on another one."""

    # ---- results ----

    def update(self, result: StepResult) -> None:
        """Delivers the results of a batch; all its requests end.

        After a failed batch, its requests run again, each alone. One that was alone in it fails if the error
        is its own, or if further attempts are hopeless.

        Raises:
            Internal: the result belongs to another plan; the state of the worker is unknown then.
        """
        plan = self._plan
        if plan is None or plan.step != result.step:
            raise Internal(
                f"the worker answered step {result.step}, expected {plan.step if plan else 'none'}"
            )
        batch, self._batch, self._plan = self._batch, [], None
        self._owner.released()
        if result.report is not None:
            self.stats.report = result.report
        if result.error is not None:
            self._apply_failure(batch, result.error)
            return
        assert isinstance(plan.work, Pool)
        times = self.stats.seconds.setdefault(plan.work.shape, Distribution(STEP_SECONDS))
        times.observe(result.execute_us * 1e-6)
        self.stats.times.chunk.observe(plan.work.shape.num_tokens, result.execute_us * 1e-6)
        outputs = {output.slot: output for output in result.outputs}
        for slot, request in enumerate(batch):
            if request is None:
                continue
            error = self._fault(outputs.get(slot), request)
            event = Event(request.request_id, error=error)
            if error is None:
                values = outputs[slot].pooled
                event = Event(request.request_id, finish_reason=FinishReason.STOP, pooled=values)
                event = event.as_first(request)
            self._end(request, event)

    def _apply_failure(self, batch: Sequence[Request | None], error: TriptychError) -> None:
        is_its_own = isinstance(error, InvalidArgument)
        for request in batch:
            if request is None:
                continue
            request.step_failures += 1
            if not is_its_own:
                assert request.replica_id is not None
                request.failed_on.add(request.replica_id)
            if len(batch) == 1 and (is_its_own or self._owner.is_hopeless(request)):
                self._end(request, Event(request.request_id, error=error))
            else:
                request.slot = None
                self._owner.requeue(request)

    def _end(self, request: Request, event: Event) -> None:
        request.state, request.slot = RequestState.FINISHED, None
        request.note_end(event, self._clock())
        request.sink.push(event)
        self._owner.forget(request)

    def _fault(self, output: SlotOutput | None, request: Request) -> TriptychError | None:
        """Returns why a row has no valid result; None if it has one."""
        if output is not None and isinstance(output.error, NotFinite):
            self.stats.not_finite += 1
            return NotFinite(f"{output.error.message} for request {request.request_id}")
        if output is not None and output.error is not None:
            return output.error
        count = len(output.pooled) if output is not None else 0
        assert request.pooling is not None
        expected = count_values(request.pooling, len(request.token_ids), self._pooled_size)
        if count != expected:
            return Internal(
                f"the worker returned {count} values for request {request.request_id}, not {expected}"
            )
        return None
