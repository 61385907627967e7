"""One replica of a pooling model: which batch its worker runs next, and what becomes of the results.

The same two steps as of a generating replica (:mod:`scheduler_svc.replica.scheduler`), without KV memory: a batch takes slots 0, 1, 2, ...,
runs once, and is over.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from protos.errors import Internal, TriptychError
from scheduler_svc.pooling.batching import PoolShape
from scheduler_svc.replica.step_plan import Admission, Pool, SlotOutput, StepPlan, StepResult
from scheduler_svc.requests.request import Event, FinishReason, Request, RequestState


class PoolOwner(Protocol):
    """Where batches come from and whom to tell; the pooling engine is one."""

    def take(self) -> tuple[PoolShape, list[Request]] | None:
        """The next batch for a device that is free; None if nobody waits."""

    def forget(self, request: Request) -> None:
        """The request has ended."""


@dataclass(slots=True)
class PoolStats:
    """Counters from the start of a replica.

    Attributes:
        batches: steps by shape.
        rows: requests in them, by shape; the other rows were padding.
        tokens: prompt tokens in them, by shape; the other tokens were padding.
    """

    batches: Counter[PoolShape] = field(default_factory=Counter)
    rows: Counter[PoolShape] = field(default_factory=Counter)
    tokens: Counter[PoolShape] = field(default_factory=Counter)


class PoolScheduler:
    """Static batching: a batch leaves when the device is free, padded to its shape.

    Attributes:
        stats: counters.
    """

    def __init__(self, owner: PoolOwner, pooled_size: int) -> None:
        """Starts idle.

        Args:
            owner: has the requests.
            pooled_size: values of each result.
        """
        self._pooled_size = pooled_size
        self.stats = PoolStats()
        self._owner = owner
        self._step = 0
        self._plan: StepPlan | None = None
        # By slot; None where a request left while its batch ran.
        self._running: list[Request | None] = []
        # Slots of the last batch, which the worker still knows.
        self._held = 0

    @property
    def num_running(self) -> int:
        """Requests in the batch that runs."""
        return sum(request is not None for request in self._running)

    @property
    def idle(self) -> bool:
        """Whether no batch runs."""
        return self._plan is None

    def step(self) -> StepPlan | None:
        """The next batch, or None if nobody waits. Must not be called while an earlier plan's result is outstanding."""
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

    def update(self, result: StepResult) -> None:
        """Takes in a batch's results; every request of it ends.

        Raises:
            Internal: if results and plans do not match; the replica's state is unknown then.
        """
        plan = self._plan
        if plan is None or plan.step != result.step:
            raise Internal(
                f"the worker answered step {result.step}, expected {plan.step if plan else 'none'}"
            )
        self._plan = None
        running, self._running = self._running, []
        outputs = {output.slot: output for output in result.outputs}
        for slot, request in enumerate(running):
            if request is None:
                continue
            error = result.error or self._fault(outputs.get(slot), request)
            values = () if error else outputs[slot].pooled
            self._finish(request, values, error)

    def abort(self, request: Request) -> None:
        """Ends a request whose batch runs; its row's result is dropped when it comes."""
        assert request.slot is not None
        self._running[request.slot] = None
        request.state = RequestState.FINISHED
        request.sink.push(Event(request.request_id, finish_reason=FinishReason.ABORT))
        self._owner.forget(request)

    def abandon(self) -> list[Request]:
        """Takes all requests off a replica that is lost, ready to be queued again."""
        requests = [request for request in self._running if request is not None]
        for request in requests:
            request.slot, request.state = None, RequestState.WAITING
        self._running, self._plan = [], None
        return requests

    def _finish(self, request: Request, values: Sequence[float], error: TriptychError | None) -> None:
        request.state, request.slot = RequestState.FINISHED, None
        if error is not None:
            request.sink.push(Event(request.request_id, error=error))
        else:
            event = Event(request.request_id, finish_reason=FinishReason.STOP, pooled=values)
            request.sink.push(event.as_first(request))
        self._owner.forget(request)

    def _fault(self, output: SlotOutput | None, request: Request) -> TriptychError | None:
        """Why a row has no result that could be passed on, if so."""
        if output is not None and output.error is not None:
            return output.error
        count = len(output.pooled) if output is not None else 0
        if count != self._pooled_size:
            return Internal(
                f"the worker gave {count} values for request {request.request_id}, not {self._pooled_size}"
            )
        return None


def _admission(slot: int, request: Request) -> Admission:
    return Admission(
        slot=slot,
        request_id=request.request_id,
        token_ids=tuple(request.token_ids),
        num_prompt_tokens=len(request.token_ids),
        num_computed=0,
        sampling=request.sampling,
        block_ids=(),
        pooling=request.pooling,
    )
