"""Logs of requests whose answers another client may continue, kept for a while after their end.

A log costs nothing per token. While its request runs, the tokens are those of the scheduler's own
:class:`Request`; they are copied when it ends. Only log-probabilities are collected as they pass.
"""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from protos.errors import InvalidArgument, NotFound
from protos.triptych.v1 import common_pb2
from scheduler_svc.requests.admission import EventLogSpec, Submission
from scheduler_svc.requests.request import Event, Request, Sink
from scheduler_svc.requests.sampling import FinishReason

# What a sequence without tokens counts as, so that the number of logs is bounded, too.
_SEQUENCE_WEIGHT = 64


@dataclass(slots=True)
class SequenceLog:
    """What one sequence has brought, over all of its runs."""

    token_ids: Sequence[int] = ()
    """The tokens when the last run ended, or when the present one began."""
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    """One entry per token if the request asks for them."""
    finish_reason: FinishReason | None = None
    """Why the sequence ended by itself; None if it can be continued."""
    stop_token_id: int | None = None
    """The token that ended it, if one did."""
    worker_losses: int = 0
    """Workers lost in a row while they ran the sequence."""
    run: Request | None = None
    """The sequence while it runs."""

    @property
    def weight(self) -> int:
        """Tokens and entries of log-probabilities that the log holds itself."""
        return len(self.token_ids) + _num_entries(self.logprobs)

    def stop(self) -> None:
        """Keeps the tokens of the run that ends."""
        if self.run is not None:
            self.token_ids = array("I", self.run.token_ids[self.run.num_prompt_tokens :])
            self.run = None

    def rewind(self, received: tuple[int, ...]) -> bool:
        """Forgets what follows ``received``; returns False if the sequence does not begin with it."""
        known = len(received)
        if tuple(self.token_ids[:known]) != received:
            return False
        self.token_ids, self.finish_reason, self.stop_token_id = array("I", received), None, None
        del self.logprobs[known:]
        return True


@dataclass(slots=True, eq=False)
class RequestLog:
    """The events of one request, over all of its runs."""

    spec: EventLogSpec
    request_id: str
    """The id of the last run."""
    seed: int
    num_prompt_tokens: int
    sequences: list[SequenceLog]
    num_cached_tokens: int = 0
    """Prompt tokens that the first run found in the prefix cache."""
    replica_id: str = ""
    """The replica that the first run began on."""
    lora_digest: str = ""
    """Digest of the LoRA adapter that the last run used."""
    announced: bool = False
    """Whether the first event has passed."""
    prompt_logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    """Entries of the prompt's tokens but the first, if the request asks for them."""
    starting: bool = False
    """Whether the engine is taking the request."""
    expiry: asyncio.TimerHandle | None = None
    """Ends the log; set while no sequence runs."""
    counted: int = 0
    """The weight that it was counted with last."""

    @classmethod
    def of(cls, spec: EventLogSpec, submission: Submission) -> "RequestLog | None":
        """Returns the log of a request that has none; None if a part of its answer is not known here."""
        asks_logprobs = submission.sampling.params.HasField("logprobs")
        if any(one.finished or (one.token_ids and asks_logprobs) for one in submission.resumed):
            return None
        sequences = [SequenceLog(array("I", received)) for received in submission.sequences.values()]
        return cls(
            spec,
            submission.request_id,
            submission.sampling.params.seed,
            len(submission.prompt_token_ids),
            sequences,
        )

    @property
    def weight(self) -> int:
        """Tokens and entries of log-probabilities that the log holds itself."""
        own = sum(_SEQUENCE_WEIGHT + one.weight for one in self.sequences)
        return own + _num_entries(self.prompt_logprobs)

    @property
    def is_running(self) -> bool:
        """Whether a sequence runs, or is about to."""
        return self.starting or any(one.run is not None for one in self.sequences)

    def rewind(self, submission: Submission) -> bool:
        """Forgets what a client that continues the request has not received; returns False if it cannot."""
        resumed = {one.sequence: one for one in submission.resumed}
        for number, one in enumerate(self.sequences):
            known = resumed.get(number)
            if known is not None and known.finished:
                continue
            if not one.rewind(known.token_ids if known is not None else ()):
                return False
        if submission.sampling.reports_prompt:
            self.prompt_logprobs.clear()  # all of them come again
        return len(self.sequences) == submission.n

    def follow(self, request: Request | None) -> None:
        """Reads the tokens of a run, given one of its live sequences."""
        members = [] if request is None else [request] if request.group is None else request.group.members
        for one in members:
            self.sequences[one.sequence].run = one

    def record(self, event: Event) -> None:
        """Keeps what an event brings beside plain tokens, and the tokens of a sequence that ends."""
        one = self.sequences[event.sequence]
        if event.first:
            self.lora_digest = event.lora_digest
            if not self.announced:
                self.announced, self.num_cached_tokens = True, event.num_cached_tokens
                self.replica_id = event.replica_id
        one.logprobs += event.logprobs
        self.prompt_logprobs += event.prompt_logprobs
        if event.worker_losses is not None:
            one.worker_losses = event.worker_losses
        if event.error is not None:
            for each in self.sequences:
                each.stop()
        elif event.finish_reason is not None:
            one.stop()
            if event.finish_reason is not FinishReason.ABORT:
                one.finish_reason, one.stop_token_id = event.finish_reason, event.stop_token_id


def _num_entries(logprobs: Sequence[common_pb2.TokenLogprobs]) -> int:
    return sum(1 + len(entry.top_token_ids) for entry in logprobs)


class Runs(Protocol):
    """The engine, as far as logs need it."""

    def submit(self, submission: Submission, sink: Sink) -> None:
        """Enqueues a request; its events go to `sink`."""

    def abort(self, request_id: str, sequence: int | None = None) -> bool:
        """Aborts a request; returns whether it was live."""

    def find(self, request_id: str) -> Request | None:
        """Returns the live request with that id, or the first of its sequences."""


class LoggedSink:
    """Passes the events of one client's requests on, and shows those in full to the logs."""

    def __init__(self, sink: Sink, record: Callable[[Event], None]) -> None:
        """Passes everything on to ``sink``."""
        self._sink = sink
        self._record = record

    def push(self, event: Event) -> None:
        """See ``Sink``."""
        self._record(event)
        self._sink.push(event)

    def push_tokens(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        """See ``Sink``."""
        self._sink.push_tokens(request_ids, token_ids)


class EventLogs:
    """All logs, bounded in time and in tokens."""

    def __init__(self, engine: Callable[[], Runs], *, ttl_s: float, max_tokens: int) -> None:
        """Starts without logs.

        Args:
            engine: returns the engine.
            ttl_s: seconds that a log is kept after its request has ended; 0: no logs.
            max_tokens: tokens that all logs may hold together, and entries of log-probabilities. The logs of
                the requests that ended first make room.
        """
        self._engine = engine
        self._ttl_s = ttl_s
        self._max_tokens = max_tokens
        self._logs: dict[str, RequestLog] = {}
        self._running: dict[str, RequestLog] = {}  # by the id of the run
        self._ended: dict[str, RequestLog] = {}  # in the order of their ends
        self.num_tokens = 0
        """Weight of all logs."""

    def __len__(self) -> int:
        return len(self._logs)

    def sink(self, sink: Sink) -> Sink:
        """Returns what the requests of one client push their events into, logged or not, instead of ``sink``.

        A common sink keeps their tokens of a step together.
        """
        return LoggedSink(sink, self._record)

    def submit(self, submission: Submission, sink: Sink) -> None:
        """Submits a request, and logs it if it asks for that.

        Args:
            submission: the request. If its log exists, its earlier run ends.
            sink: receives the events; :meth:`sink` made it.

        Raises:
            InvalidArgument: the log belongs to another request.
            TriptychError: as :meth:`Engine.submit` does.
        """
        engine, spec = self._engine(), submission.log
        log = self._open(spec, submission) if spec is not None and self._ttl_s else None
        if log is None:
            engine.submit(submission, sink)
            return
        log.starting = True
        self._running[submission.request_id] = log
        try:
            engine.submit(submission, sink)
            log.follow(engine.find(submission.request_id))
        finally:
            log.starting = False
            self._settle(log)

    def take(self, log_id: str, digest: str) -> RequestLog:
        """Ends the run of a logged request and returns its log.

        Raises:
            NotFound: the log is unknown, or no longer kept.
            InvalidArgument: the log belongs to another request.
        """
        log = self._logs.get(log_id)
        if log is None:
            raise NotFound(
                "the answer that Last-Event-ID names cannot be continued: it is unknown, or it was kept for "
                f"{self._ttl_s:g} s and is gone; send the request again without Last-Event-ID",
                param="Last-Event-ID",
            )
        self._stop(log, digest)
        return log

    def _open(self, spec: EventLogSpec, submission: Submission) -> RequestLog | None:
        log = self._logs.get(spec.log_id)
        if log is not None:
            self._stop(log, spec.digest)
            if not log.rewind(submission):
                self._drop(log)
                log = None
        if log is None:
            log = RequestLog.of(spec, submission)
        if log is not None:
            log.request_id = submission.request_id
            self._logs[spec.log_id] = log
        return log

    def _stop(self, log: RequestLog, digest: str) -> None:
        """Ends the run of ``log``, if ``digest`` shows that it is the right one."""
        if log.spec.digest != digest:
            raise InvalidArgument(
                "the request is not the one that Last-Event-ID names; send the same body to the same path, with the "
                "same X-Tenant",
                param="Last-Event-ID",
            )
        if log.is_running:
            self._engine().abort(log.request_id)

    def _record(self, event: Event) -> None:
        log = self._running.get(event.request_id)
        if log is None:
            return
        log.record(event)
        if event.error is not None and not event.error.retryable:
            self._drop(log)
        elif event.error is not None or event.finish_reason is not None:
            self._settle(log)
        else:
            self._weigh(log, log.counted + _num_entries(event.logprobs) + _num_entries(event.prompt_logprobs))

    def _settle(self, log: RequestLog) -> None:
        """Counts what a log holds, and starts its time if its request has ended."""
        log_id = log.spec.log_id
        if self._logs.get(log_id) is not log:
            return
        if log.expiry is not None:
            log.expiry.cancel()
            log.expiry = None
        self._ended.pop(log_id, None)
        if not log.is_running:
            self._running.pop(log.request_id, None)
            self._ended[log_id] = log
            log.expiry = asyncio.get_running_loop().call_later(self._ttl_s, self._drop, log)
        self._weigh(log, log.weight)

    def _weigh(self, log: RequestLog, weight: int) -> None:
        """Counts ``log`` as that heavy, and makes room if all logs together are too heavy."""
        self.num_tokens += weight - log.counted
        log.counted = weight
        while self.num_tokens > self._max_tokens:
            self._drop(next(iter(self._ended.values()), None) or next(iter(self._logs.values())))

    def _drop(self, log: RequestLog) -> None:
        """Forgets a log; its request runs on if it runs."""
        log_id = log.spec.log_id
        if self._logs.get(log_id) is not log:
            return
        if log.expiry is not None:
            log.expiry.cancel()
        del self._logs[log_id]
        self._ended.pop(log_id, None)
        self._running.pop(log.request_id, None)
        self.num_tokens -= log.counted
        log.counted = 0
