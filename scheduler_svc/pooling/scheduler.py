"""The scheduler of one pooling replica: plans the next batch and delivers its results.

It offers the same two calls as :mod:`scheduler_svc.replica.scheduler`, without KV memory: a batch occupies
slots 0, 1, 2, ..., runs once and ends.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from protos.errors import Internal, InvalidArgument, TriptychError
from protos.steps import Admission, Pool, PoolShape, SlotOutput, StepPlan, StepResult
from protos.triptych.v1.worker_pb2 import WorkerReport
from protos.validation import count_values
from scheduler_svc.pooling.tasks import PooledModel
from scheduler_svc.replica.stats import STEP_SECONDS, Distribution
from scheduler_svc.replica.suspects import Abandoned, Loss
from scheduler_svc.requests.request import Event, Request, RequestState
from scheduler_svc.requests.sampling import FinishReason


class PoolOwner(Protocol):
    """The calls of a replica to the pooling engine."""

    def take(self) -> tuple[PoolShape, list[Request]] | None:
        """Returns the next batch for a free device; None if no request waits."""

    def requeue(self, request: Request) -> None:
        """Lets a request wait again."""

    def is_hopeless(self, request: Request) -> bool:
        """Whether batches of the request alone have failed often enough, and on every replica."""

    def forget(self, request: Request) -> None:
        """Forgets a request that has ended."""

    def end_trace(self, request: Request, event: Event) -> None:
        """Writes the spans of a request, given its last event."""


@dataclass(slots=True)
class PoolStats:
    """Counters since the start of a replica."""

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
    report: WorkerReport = field(default_factory=WorkerReport)
    """What the worker reported last."""


class PoolScheduler:
    """Static batching: whenever the device is free, it runs a batch that is padded to its shape."""

    def __init__(self, owner: PoolOwner, model: PooledModel) -> None:
        """Starts idle.

        Args:
            owner: provides the batches.
            model: says how many values each result has.
        """
        self._model = model
        self.stats = PoolStats()
        self._owner = owner
        self._step = 0
        self._plan: StepPlan | None = None
        # By slot; None after a request was aborted while its batch ran.
        self._running: list[Request | None] = []
        # Slots of the last batch, which the worker still holds.
        self._held = 0

    @property
    def num_running(self) -> int:
        """Requests in the running batch."""
        return sum(request is not None for request in self._running)

    @property
    def idle(self) -> bool:
        """Whether no batch runs."""
        return self._plan is None

    @property
    def is_busy(self) -> bool:
        """Whether requests are in the running batch."""
        return self.num_running > 0

    def next_plan(self) -> StepPlan | None:
        """Plans the next batch; returns None while one runs, or if no request waits."""
        if self._plan is not None:
            return None
        taken = self._owner.take()
        if taken is None:
            return None
        shape, requests = taken
        for slot, request in enumerate(requests):
            request.slot, request.state = slot, RequestState.PREFILLING
        self._running = list(requests)
        self._step += 1
        self._plan = StepPlan(
            self._step,
            Pool(tuple(range(len(requests))), shape),
            release=tuple(range(self._held)),
            admit=tuple(_admission(slot, request) for slot, request in enumerate(requests)),
        )
        self._held = len(requests)
        self.stats.batches[shape] += 1
        self.stats.rows[shape] += len(requests)
        self.stats.tokens[shape] += sum(len(request.token_ids) for request in requests)
        return self._plan

    def drain(self) -> None:
        """Does nothing: no batch depends on another one."""

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
        self._plan = None
        running, self._running = self._running, []
        if result.report is not None:
            self.stats.report = result.report
        if result.error is not None:
            self._apply_failure(running, result.error)
            return
        if isinstance(plan.work, Pool):
            times = self.stats.seconds.setdefault(plan.work.shape, Distribution(STEP_SECONDS))
            times.observe(result.execute_us * 1e-6)
        outputs = {output.slot: output for output in result.outputs}
        for slot, request in enumerate(running):
            if request is None:
                continue
            error = self._fault(outputs.get(slot), request)
            values = () if error else outputs[slot].pooled
            self._finish(request, values, error)

    def stop(self, request: Request, event: Event) -> None:
        """Ends a request of the running batch with its last event; the result of its row will be dropped."""
        assert request.slot is not None
        self._running[request.slot] = None
        request.state = RequestState.FINISHED
        self._owner.end_trace(request, event)
        request.sink.push(event)
        self._owner.forget(request)

    def abandon(self, loss: Loss) -> Abandoned:
        """Removes and returns all requests of a lost replica, ready to wait again."""
        running, self._running, self._plan = self._running, [], None
        requests = [request for request in running if request is not None]
        for request in requests:
            request.slot, request.state = None, RequestState.WAITING
            request.worker_losses += loss.blames
        alone = loss.blames and len(running) == len(requests) == 1
        return Abandoned(requests, requests if loss.blames else [], requests[0] if alone else None)

    def _apply_failure(self, running: Sequence[Request | None], error: TriptychError) -> None:
        is_its_own = isinstance(error, InvalidArgument)
        for request in running:
            if request is None:
                continue
            request.step_failures += 1
            if not is_its_own:
                assert request.replica_id is not None
                request.failed_on.add(request.replica_id)
            if len(running) == 1 and (is_its_own or self._owner.is_hopeless(request)):
                self._finish(request, (), error)
            else:
                request.slot, request.state = None, RequestState.WAITING
                self._owner.requeue(request)

    def _finish(self, request: Request, values: Sequence[float], error: TriptychError | None) -> None:
        request.state, request.slot = RequestState.FINISHED, None
        event = Event(request.request_id, error=error)
        if error is None:
            event = Event(request.request_id, finish_reason=FinishReason.STOP, pooled=values).as_first(
                request
            )
        self._owner.end_trace(request, event)
        request.sink.push(event)
        self._owner.forget(request)

    def _fault(self, output: SlotOutput | None, request: Request) -> TriptychError | None:
        """Returns why a row has no valid result; None if it has one."""
        if output is not None and output.error is not None:
            return output.error
        count = len(output.pooled) if output is not None else 0
        assert request.pooling is not None
        expected = count_values(request.pooling, len(request.token_ids), self._model.size)
        if count != expected:
            return Internal(
                f"the worker returned {count} values for request {request.request_id}, not {expected}"
            )
        return None


def _admission(slot: int, request: Request) -> Admission:
    return Admission(
        slot=slot,
        request_id=request.request_id,
        token_ids=tuple(request.token_ids),
        num_prompt_tokens=len(request.token_ids),
        num_computed_tokens=0,
        sampling=request.sampling.params,
        blocks={},
        pooling=request.pooling,
        traceparent=request.traceparent,
    )
