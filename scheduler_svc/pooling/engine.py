"""All requests and all replicas of a pooling deployment; what :mod:`scheduler_svc.dispatch.engine` is for one that generates.

A request waits until some device is free, runs once, and is over. A lost replica's requests wait again.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from protos.errors import (
    ContextExceeded,
    InvalidArgument,
    Overloaded,
    TriptychError,
    Unavailable,
    Unsupported,
)
from scheduler_svc.policy.order import OrderPolicy
from scheduler_svc.pooling.batching import PoolQueue, PoolShape, listed
from scheduler_svc.pooling.scheduler import PoolScheduler
from scheduler_svc.requests.request import Event, FinishReason, Pooling, PoolTask, Request, RequestState, Sink
from scheduler_svc.requests.sampling import NOTHING_SAMPLED


@dataclass(frozen=True, slots=True)
class PoolSubmission:
    """A request on its way in; validated as far as that is possible without knowing the model."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    pooling: Pooling
    priority: int = 0
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class PooledModel:
    """What admission must know about the model.

    Attributes:
        vocab_size: token ids are below this.
        tasks: what its results are for.
        size: values of a result.
    """

    vocab_size: int
    tasks: frozenset[PoolTask]
    size: int


@dataclass(slots=True)
class PoolReplica:
    """A ready replica: its scheduler, and how to tell its driver that there is work."""

    scheduler: PoolScheduler
    wake: Callable[[], None]


class PoolEngine:
    """Admits, queues, hands batches to free replicas, aborts; knows every live request by id.

    Attributes:
        replicas: ready replicas by id.
        model: set while the deployment takes requests.
    """

    def __init__(
        self, *, max_waiting: int, max_waiting_tokens: int, clock: Callable[[], float],
        make_order: Callable[[], OrderPolicy],
    ) -> None:  # fmt: skip
        """Starts without replicas and without shapes.

        Args:
            max_waiting: requests that may wait at once.
            max_waiting_tokens: prompt tokens that may wait at once.
            clock: monotonic seconds.
            make_order: makes a policy that says whose turn it is.
        """
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._clock = clock
        self._make_order = make_order
        self._arrivals = itertools.count()
        self._live: dict[str, Request] = {}
        self._empty: asyncio.Event | None = None
        self._queue: PoolQueue | None = None
        self.replicas: dict[str, PoolReplica] = {}
        self.model: PooledModel | None = None

    @property
    def num_running(self) -> int:
        """Requests in a batch that runs, over all replicas."""
        return sum(replica.scheduler.num_running for replica in self.replicas.values())

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a batch."""
        return len(self._queue) if self._queue else 0

    @property
    def num_waiting_tokens(self) -> int:
        """Their prompt tokens."""
        return self._queue.num_tokens if self._queue else 0

    @property
    def shapes(self) -> tuple[PoolShape, ...]:
        """The deployment's shapes; none before :meth:`serve`."""
        return self._queue.shapes if self._queue is not None else ()

    def serve(self, model: PooledModel, shapes: tuple[PoolShape, ...]) -> None:
        """Takes requests from now on; the first call fixes the shapes."""
        self.model = model
        if self._queue is None:
            self._queue = PoolQueue(shapes, self._make_order)

    # ---- requests ------------------------------------------------------------------------------------------------------------------

    def submit(self, submission: PoolSubmission, sink: Sink) -> None:
        """Queues a request; its one event goes to ``sink``.

        Raises:
            Unavailable: no replica has been ready yet.
            InvalidArgument: the id is in use, or a token id or the task cannot be served.
            ContextExceeded: the prompt fits no shape.
            Overloaded: the queue is full.
        """
        model, queue = self.model, self._queue
        if model is None or queue is None:
            raise Unavailable("no worker is ready yet; retry in a few seconds", retry_after_ms=2000)
        if submission.request_id in self._live:
            raise InvalidArgument(
                f"request id {submission.request_id!r} is in use; ids must be unique", param="request_id"
            )
        self._check(submission, model, queue)
        count = len(submission.prompt_token_ids)
        if len(queue) >= self._max_waiting or (
            queue.num_tokens and queue.num_tokens + count > self._max_waiting_tokens
        ):
            raise Overloaded(
                f"{len(queue)} requests with {queue.num_tokens} tokens are waiting; retry later",
                retry_after_ms=1000,
            )
        request = Request(
            request_id=submission.request_id,
            token_ids=list(submission.prompt_token_ids),
            num_prompt_tokens=count,
            sampling=NOTHING_SAMPLED,
            arrival=next(self._arrivals),
            arrival_s=self._clock(),
            sink=sink,
            end=count,
            priority=submission.priority,
            tenant=submission.tenant,
            pooling=submission.pooling,
        )
        self._live[request.request_id] = request
        queue.add(request)
        self._wake_one()

    def abort(self, request_id: str) -> bool:
        """Ends a request, wherever it is. Unknown and finished ids are no error.

        Returns:
            Whether a live request was found.
        """
        request = self._live.get(request_id)
        if request is None:
            return False
        if self._queue is not None and self._queue.remove(request):
            self._end(request, Event(request_id, finish_reason=FinishReason.ABORT))
        elif (replica := self.replicas.get(request.replica_id or "")) is not None:
            replica.scheduler.abort(request)
        return True

    def take(self, replica_id: str) -> tuple[PoolShape, list[Request]] | None:
        """The next batch, for a replica whose device is free; None if nobody waits."""
        now = self._clock()
        taken = self._queue.take(now) if self._queue else None
        if taken is None:
            return None
        for request in taken[1]:
            request.replica_id = replica_id
            if request.delivery.first_scheduled_s is None:
                request.delivery.first_scheduled_s = now
        if self._queue:
            self._wake_one(but=replica_id)
        return taken

    def forget(self, request: Request) -> None:
        """Called by replicas when a request has ended."""
        self._live.pop(request.request_id, None)
        if not self._live and self._empty is not None:
            self._empty.set()

    def fail_waiting(self, error: TriptychError) -> int:
        """Ends every waiting request with ``error``; returns how many."""
        requests = self._queue.drain() if self._queue else []
        for request in requests:
            self._end(request, Event(request.request_id, error=error))
        return len(requests)

    async def drained(self, timeout_s: float) -> bool:
        """Waits until no request is live; False if some still are after ``timeout_s`` seconds."""
        if not self._live:
            return True
        self._empty = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        return not self._live

    # ---- replicas ------------------------------------------------------------------------------------------------------------------

    def make_scheduler(self, replica_id: str, model: PooledModel) -> PoolScheduler:
        """The scheduler of a replica that is about to be attached and runs ``model``."""
        return PoolScheduler(_Share(self, replica_id), model.size)

    def attach(self, replica_id: str, replica: PoolReplica) -> None:
        """Adds a ready replica; it may get requests at once."""
        self.replicas[replica_id] = replica
        replica.wake()

    def detach(self, replica_id: str) -> int:
        """Removes a replica that is lost or going; its requests wait again, in the places that their arrivals give them.

        Returns:
            How many requests were put back.
        """
        replica = self.replicas.pop(replica_id, None)
        if replica is None:
            return 0
        requests = replica.scheduler.abandon()
        for request in requests:
            assert self._queue is not None
            self._queue.add(request)
        for other in self.replicas.values():
            if other.scheduler.idle:
                other.wake()
        return len(requests)

    # ---- parts ---------------------------------------------------------------------------------------------------------------------

    def _wake_one(self, but: str = "") -> None:
        """Lets a free replica look at the queue; it wakes the next one if it leaves something."""
        for replica_id, replica in self.replicas.items():
            if replica.scheduler.idle and replica_id != but:
                replica.wake()
                return

    def _end(self, request: Request, event: Event) -> None:
        request.state = RequestState.FINISHED
        self.forget(request)
        request.sink.push(event)

    def _check(self, submission: PoolSubmission, model: PooledModel, queue: PoolQueue) -> None:
        task = submission.pooling.task
        if task not in model.tasks:
            served = ", ".join(sorted(one.value for one in model.tasks))
            raise Unsupported(f"this model serves {served}, not {task.value}", param="task")
        for token in submission.prompt_token_ids:
            if token >= model.vocab_size:
                raise InvalidArgument(
                    f"token id {token} is not in the vocabulary of {model.vocab_size} tokens",
                    param="prompt_token_ids",
                )
        count = len(submission.prompt_token_ids)
        if queue.fit(count) is None:
            raise ContextExceeded(
                f"the prompt has {count} tokens and fits none of the shapes {listed(queue.shapes)}; "
                f"shorten it to at most {queue.shapes[-1].prompt_len} tokens",
                param="prompt",
            )


@dataclass(frozen=True, slots=True)
class _Share:
    """What one replica sees of the engine."""

    engine: PoolEngine
    replica_id: str

    def take(self) -> tuple[PoolShape, list[Request]] | None:
        """See ``PoolOwner``."""
        return self.engine.take(self.replica_id)

    def forget(self, request: Request) -> None:
        """See ``PoolOwner``."""
        self.engine.forget(request)
