"""A replica of a pooling model: every step runs a batch of texts, padded to a static shape.

A request uses the shapes of the smallest prompt length that it fits into
(:mod:`scheduler_svc.shapes.shape_config`). Whenever the device is free, it runs the next request together
with others of the same prompt length, up to the rows of the chosen shape. A packed shape takes requests
of any length as long as their tokens fit. No request waits for a batch to fill, and only the first of a batch
leaves the queue before the batch is planned.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from protos.errors import Internal, TriptychError
from protos.steps import Pool, PoolShape, SlotOutput, StepPlan, StepResult
from protos.validation import count_values
from scheduler_svc.adapters.seats import AdapterSeats
from scheduler_svc.replica.plans import InFlight, StepsInFlight, admission_of
from scheduler_svc.replica.quarantine import EvictedRequests, Loss, accuse, blame
from scheduler_svc.replica.slots import ReplicaOwner
from scheduler_svc.replica.stats import STEP_SECONDS, Distribution, PoolStats
from scheduler_svc.requests.request import Event, Request, RequestState
from scheduler_svc.requests.sampling import FinishReason
from scheduler_svc.shapes.shape_config import PACKED_TOKENS

# The largest share of padding among a batch's rows: where a step takes about as long with few rows as with
# many, and where each row has its price.
_PADDING, _COSTLY_PADDING = 1 / 2, 1 / 8


def choose_batch(waiting: int, batches: Sequence[int], *, padding_costs: bool = False) -> int:
    """Returns the batch size best filled by `waiting` requests.

    This is the smallest batch for all of them, or if too many of its rows would be padding, the largest
    batch they fill. If no batch is small enough or large enough, the nearest is used.

    Args:
        waiting: number of requests, at least 1.
        batches: sizes to choose from, ascending; not empty.
        padding_costs: whether a row of padding takes as long as another. It still is better than a step of
            less than half as many rows.
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
        """Removes the requests accepted by `joins`, in order; None ends the search."""


class PoolOwner(ReplicaOwner, Protocol):
    """The calls of a pooling replica to the engine."""

    @property
    def waiting(self) -> Waiting:
        """Requests waiting for a batch."""


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
            shapes: not empty; all are packed or none.
            pooled_size: values of a vector of the model.
            owner: provides the waiting requests, and takes those that leave.
            clock: monotonic seconds.
            padding_costs: whether a row of padding takes as long as another.
        """
        self.stats = PoolStats()
        self.adapters = AdapterSeats(0, 0, clock)  # pooling models run no LoRA adapters
        self._shapes = sorted(shapes)
        self._pooled_size = pooled_size
        self._owner = owner
        self._clock = clock
        self._padding_costs = padding_costs
        self._step = 0
        # The next batch, by slot. Until it is planned, at most its first request.
        self._batch: list[Request] = []
        # At most the batch on the worker.
        self._in_flight = StepsInFlight()
        # Slots of the last batch, still held by the worker.
        self._held = 0

    # ---- state ----

    @property
    def num_running(self) -> int:
        """Requests in a batch."""
        return len(self._requests)

    @property
    def is_busy(self) -> bool:
        """Whether requests are in a batch."""
        return bool(self._requests)

    @property
    def has_free_slot(self) -> bool:
        """Whether the next batch is empty."""
        return not (self._batch or self._in_flight)

    @property
    def _requests(self) -> list[Request]:
        return [*self._batch, *(request for step in self._in_flight for request in step.here)]

    def fits(self, request: Request) -> bool:
        """Whether a shape is large enough for the request."""
        return len(request.token_ids) <= self._shapes[-1].prompt_len

    def shares_prompt(self, request: Request) -> bool:
        """Returns False: a pooling request is a single sequence."""
        del request
        return False

    def cached_tokens(self, request: Request) -> int:
        """Returns 0: nothing is cached."""
        del request
        return 0

    # ---- admitting and releasing requests ----

    def admit(self, request: Request) -> bool:
        """Makes a waiting request the first of the next batch; returns whether it is."""
        return self.has_free_slot and self._add(request)

    def stop(self, request: Request, event: Event) -> None:
        """Ends a request of the batch with its last event; the result of its row will be dropped."""
        assert request.slot is not None
        if self._batch:
            self._batch.clear()
            self._owner.released()
        self._in_flight.leave(request.slot)
        self._finish(request, event)

    def abandon(self, loss: Loss) -> EvictedRequests:
        """Takes all requests off a lost replica; the loss may make suspects of those in a running batch."""
        requests = self._requests
        suspects, culprit = accuse(self._in_flight, loss, requests)
        self._batch.clear()
        self._in_flight.clear()
        for request in requests:
            request.slot, request.state = None, RequestState.WAITING
        return EvictedRequests(requests, suspects, culprit)

    # ---- deciding ----

    def next_plan(self) -> StepPlan | None:
        """Fills the next batch from the queue; returns None without a first request or while a batch runs."""
        if not self._batch:
            return None
        (first,) = self._batch
        if first.suspect:
            shape = self._smallest(len(first.token_ids), 1)
        else:
            shape = self._pack(first) if self._shapes[0].packed else self._fill_rows(first)
        batch = self._batch
        self._step += 1
        plan = StepPlan(
            self._step,
            Pool(tuple(range(len(batch))), shape),
            release=tuple(range(self._held)),
            admit=tuple(map(admission_of, batch)),
        )
        self._in_flight.add(InFlight(plan, batch, self._clock()))
        self._batch = []
        self._held = len(batch)
        self.stats.batches[shape] += 1
        self.stats.rows[shape] += len(batch)
        self.stats.tokens[shape] += sum(len(request.token_ids) for request in batch)
        return plan

    def _smallest(self, num_tokens: int, num_texts: int) -> PoolShape:
        """Returns the smallest shape with so much room."""
        return next(
            shape for shape in self._shapes if shape.prompt_len >= num_tokens and shape.batch >= num_texts
        )

    def _fill_rows(self, first: Request) -> PoolShape:
        """Adds requests of the prompt length of the first; returns the shape."""
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
        """Adds requests in turn until the next does not fit; returns the shape.

        They fill a shape of at most `PACKED_TOKENS`, unless the first needs more.
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
        request.slot, request.state = len(self._batch), RequestState.PREFILLING
        if self._batch:
            request.replica_id = self._batch[0].replica_id
        self._batch.append(request)
        self.stats.count_start(request, self._clock())
        self._owner.admitted(request)
        return True

    def drain(self) -> None:
        """Does nothing: no batch depends on another."""

    # ---- results ----

    def update(self, result: StepResult) -> None:
        """Delivers the results of a batch; all its requests end, or run again if the step failed.

        Raises:
            Internal: the result belongs to another plan; the state of the worker is unknown then.
        """
        step = self._in_flight.match(result)
        self._in_flight.close(self._clock)
        self._owner.released()
        if result.report is not None:
            self.stats.report = result.report
        if result.error is not None:
            for request, fails in blame(step, result.error, self._owner.is_hopeless):
                if fails:
                    self._finish(request, Event(request.request_id, error=result.error))
                else:
                    request.slot = None
                    self._owner.requeue(request)
            return
        assert isinstance(step.plan.work, Pool)
        shape, seconds = step.plan.work.shape, result.execute_us * 1e-6
        self.stats.seconds.setdefault(shape, Distribution(STEP_SECONDS)).observe(seconds)
        self.stats.times.chunk.observe(shape.num_tokens, seconds)
        outputs = {output.slot: output for output in result.outputs}
        for request in step.here:
            assert request.slot is not None
            output = outputs.get(request.slot, SlotOutput(request.slot))
            if (error := self._fault(output, request)) is not None:
                event = Event(request.request_id, error=error)
            else:
                event = Event(request.request_id, finish_reason=FinishReason.STOP, pooled=output.pooled)
                event = event.as_first(request)
            self._finish(request, event)

    def _finish(self, request: Request, event: Event) -> None:
        request.slot = None
        request.finish(event, self._clock())
        self._owner.forget(request)

    def _fault(self, output: SlotOutput, request: Request) -> TriptychError | None:
        """Returns the reason why a row's result is invalid; None if it is valid."""
        if output.error is not None:
            return self.stats.count_fault(request, output.error)
        count = len(output.pooled)
        assert request.pooling is not None
        expected = count_values(request.pooling, len(request.token_ids), self._pooled_size)
        if count != expected:
            return Internal(
                f"the worker returned {count} values for request {request.request_id}, not {expected}"
            )
        return None
