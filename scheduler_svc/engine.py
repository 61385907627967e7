"""All requests and all replicas: what the outside submits to, and what replicas draw work from.

Runs on one event loop's thread; nothing but :meth:`Engine.drained` waits. A request belongs to nobody while it waits, so any replica with a free slot may take it, and
a lost replica's requests simply wait again.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from protos.errors import (
    ContextExceeded,
    InvalidArgument,
    Overloaded,
    TriptychError,
    Unavailable,
    Unsupported,
)
from scheduler_svc.request import Event, FinishReason, Request, RequestState, Sink
from scheduler_svc.sampling import SamplingParams
from scheduler_svc.scheduler import ReplicaScheduler
from scheduler_svc.waiting import WaitingQueue


@dataclass(frozen=True, slots=True)
class Submission:
    """A validated request on its way in.

    Attributes:
        prompt_token_ids: at least one.
        resumed_token_ids: output that the client has already; generation goes on behind it.
        sampling: complete but for ``max_tokens``, which is cut to the context when the client named none.
        max_tokens: what the client asked for, if anything.
        sampling_fields: names of the parameters that the client set to something else than "off".
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int | None = None
    resumed_token_ids: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str = ""
    sampling_fields: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What admission must know about the model.

    Attributes:
        max_model_len: longest sequence, tokens.
        vocab_size: token ids are below this.
        sampling_fields: parameters that the workers honour.
        max_logprobs: most log-probabilities per token.
    """

    max_model_len: int
    vocab_size: int
    sampling_fields: frozenset[str]
    max_logprobs: int


@dataclass(slots=True)
class AttachedReplica:
    """A ready replica: its scheduler, and how to tell its driver that there is work."""

    scheduler: ReplicaScheduler
    wake: Callable[[], None]


class Engine:
    """Admits, queues, aborts; knows every live request by id.

    Attributes:
        waiting: requests without a slot; shared by all replicas.
        replicas: ready replicas by id.
        model: set when the first replica is ready.
    """

    def __init__(self, *, max_waiting: int, max_waiting_tokens: int, clock: Callable[[], float]) -> None:
        """Starts without replicas.

        Args:
            max_waiting: requests that may wait at once.
            max_waiting_tokens: prompt tokens that may wait at once.
            clock: monotonic seconds.
        """
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._clock = clock
        self._arrivals = itertools.count()
        self._live: dict[str, Request] = {}
        self._empty: asyncio.Event | None = None
        # Longest sequence that fits some replica's KV memory; that of the last ones while there is none.
        self._max_request_tokens = 0
        self.waiting = WaitingQueue()
        self.replicas: dict[str, AttachedReplica] = {}
        self.model: ServedModel | None = None

    @property
    def num_running(self) -> int:
        """Requests that have a slot, over all replicas."""
        return sum(replica.scheduler.num_running for replica in self.replicas.values())

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
        if submission.request_id in self._live:
            raise InvalidArgument(
                f"request id {submission.request_id!r} is in use; ids must be unique", param="request_id"
            )
        max_tokens = self._check(submission, model)
        token_ids = [*submission.prompt_token_ids, *submission.resumed_token_ids]
        if len(self.waiting) >= self._max_waiting or (
            self.waiting.num_tokens and self.waiting.num_tokens + len(token_ids) > self._max_waiting_tokens
        ):
            raise Overloaded(
                f"{len(self.waiting)} requests with {self.waiting.num_tokens} tokens are waiting; retry later",
                retry_after_ms=1000,
            )
        request = Request(
            request_id=submission.request_id,
            token_ids=token_ids,
            num_prompt_tokens=len(submission.prompt_token_ids),
            sampling=replace(submission.sampling, max_tokens=max_tokens),
            arrival=next(self._arrivals),
            arrival_s=self._clock(),
            sink=sink,
            priority=submission.priority,
            cache_salt=submission.cache_salt,
        )
        self._live[request.request_id] = request
        self.waiting.add(request)
        self._wake_all()

    def abort(self, request_id: str) -> bool:
        """Ends a request, wherever it is. Unknown and finished ids are no error.

        Returns:
            Whether a live request was found.
        """
        request = self._live.get(request_id)
        if request is None:
            return False
        if self.waiting.remove(request):
            self._end(request, Event(request_id, finish_reason=FinishReason.ABORT))
            return True
        for replica in self.replicas.values():
            if replica.scheduler.owns(request):
                replica.scheduler.abort(request)
                replica.wake()
                break
        return True

    def is_live(self, request_id: str) -> bool:
        """Whether a request with that id waits or runs."""
        return request_id in self._live

    def attach(self, replica_id: str, replica: AttachedReplica) -> None:
        """Adds a ready replica; it may draw from the queue at once."""
        self.replicas[replica_id] = replica
        self._measure_memory()
        replica.wake()

    def detach(self, replica_id: str) -> int:
        """Removes a replica that is lost or going; its requests wait again with the tokens they have.

        Returns:
            How many requests were put back.
        """
        replica = self.replicas.pop(replica_id, None)
        if replica is None:
            return 0
        requests = replica.scheduler.abandon()
        for request in requests:
            self.waiting.add(request)
        self._measure_memory()
        self._wake_all()
        return len(requests)

    def _measure_memory(self) -> None:
        """After replicas changed: what fits the largest one, and the end of waiting requests that fit none any more."""
        if not self.replicas:
            return
        self._max_request_tokens = max(replica.scheduler.kv.max_tokens for replica in self.replicas.values())
        for request in self.waiting.drain():
            needed = request.num_prompt_tokens + request.sampling.max_tokens
            if needed <= self._max_request_tokens:
                self.waiting.add(request)
                continue
            error = ContextExceeded(
                f"the request needs {needed} tokens of KV memory and the workers that are left hold {self._max_request_tokens}"
            )
            self._end(request, Event(request.request_id, error=error))

    def fail_waiting(self, error: TriptychError) -> int:
        """Ends every waiting request with ``error``; returns how many."""
        requests = self.waiting.drain()
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

    def forget(self, request: Request) -> None:
        """Called by replicas when a request has ended."""
        self._live.pop(request.request_id, None)
        if not self._live and self._empty is not None:
            self._empty.set()

    def _end(self, request: Request, event: Event) -> None:
        request.state = RequestState.FINISHED
        self.forget(request)
        request.sink.push(event)

    def _wake_all(self) -> None:
        for replica in self.replicas.values():
            replica.wake()

    def _check(self, submission: Submission, model: ServedModel) -> int:
        """Checks a submission against the model; returns the effective max_tokens."""
        num_prompt, num_resumed = len(submission.prompt_token_ids), len(submission.resumed_token_ids)
        if unserved := sorted(submission.sampling_fields - model.sampling_fields):
            raise Unsupported(
                f"{unserved[0]} is not supported by the running workers; leave it out", param=unserved[0]
            )
        if (submission.sampling.logprobs or 0) > model.max_logprobs:
            raise InvalidArgument(f"logprobs must be at most {model.max_logprobs}", param="logprobs")
        for token in itertools.chain(submission.prompt_token_ids, submission.resumed_token_ids):
            if token >= model.vocab_size:
                raise InvalidArgument(
                    f"token id {token} is not in the vocabulary of {model.vocab_size} tokens",
                    param="prompt_token_ids",
                )
        if num_prompt >= model.max_model_len:
            raise ContextExceeded(
                f"the prompt has {num_prompt} tokens and the context holds {model.max_model_len}, of which at least one is "
                f"generated; shorten the prompt to at most {model.max_model_len - 1} tokens",
                param="prompt",
            )
        room = model.max_model_len - num_prompt
        asked = submission.max_tokens
        if asked is not None and asked > room:
            raise ContextExceeded(
                f"{num_prompt} prompt tokens and max_tokens={asked} exceed the context of {model.max_model_len} tokens; "
                f"ask for at most {room}",
                param="max_tokens",
            )
        max_tokens = room if asked is None else asked
        if num_resumed >= max_tokens:
            raise InvalidArgument(
                f"all of max_tokens={max_tokens} were received already", param="resumed_token_ids"
            )
        if num_prompt + max_tokens > self._max_request_tokens:
            if asked is not None or num_prompt >= self._max_request_tokens:
                raise ContextExceeded(
                    f"{num_prompt} prompt tokens and max_tokens={max_tokens} never fit this deployment's KV memory of "
                    f"{self._max_request_tokens} tokens a request",
                    param="max_tokens",
                )
            max_tokens = self._max_request_tokens - num_prompt
        return max_tokens
