"""A request as the scheduler sees it: a sequence, its events, and its group if it is part of one.

The sequences of a client request (n > 1) share a prompt, which is computed once. The first sequence prefills
all of it but the last token; the others wait and are then forked: they share its whole blocks and copy
blocks still to be written. Every sequence runs the last prompt token in a decode step and samples its own
first token.
"""

import enum
import sys
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Final, Protocol, TypeAlias

from protos.errors import TriptychError
from protos.service.logs import get_logger
from protos.triptych.v1 import common_pb2
from scheduler_svc.adapters.registry import Adapter
from scheduler_svc.kv.sequence import SequenceKv
from scheduler_svc.requests.sampling import FinishReason, Sampling, StopRule
from scheduler_svc.requests.trace import RequestTrace

DECODING_CLEARS: Final = sys.maxsize
"""Value of `Request.cleared_at` beyond any chunk: only a decode step clears the suspect."""


class RequestState(enum.Enum):
    """Where a request is in its life."""

    WAITING = enum.auto()
    WAITING_FOR_FSM = enum.auto()
    """Waits for a replica to compile its grammar."""
    DEFERRED = enum.auto()
    """Waits for another request to compute their common prefix."""
    PREFILLING = enum.auto()
    DECODING = enum.auto()
    FINISHED = enum.auto()


@dataclass(frozen=True, slots=True)
class Event:
    """An update about a request, for its client."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: Sequence[common_pb2.TokenLogprobs] = ()
    """An entry per new token if the client asked for them, else empty."""
    finish_reason: FinishReason | None = None
    """Set in the last event of a sequence."""
    stop_token_id: int | None = None
    """The token that ended the sequence, if any."""
    first: bool = False
    """Whether this is the request's first event; the next six fields apply only then."""
    seed: int = 0
    """Given by the client or drawn."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens spared by the prefix cache."""
    queue_s: float = 0.0
    """Seconds from arrival until the request first got a slot."""
    lora_digest: str = ""
    """Digest of its LoRA adapter; empty for the base model."""
    replica_id: str = ""
    """The request's replica."""
    error: TriptychError | None = None
    """The request failed; no event follows."""
    pooled: Sequence[float] = ()
    """Result of a pooling request, row-major."""
    sequence: int = 0
    """Index of the sequence within the client's request."""
    accepted: bool = False
    """Whether the request was just accepted into the queue."""
    worker_losses: int | None = None
    """Workers lost in a row while they ran the sequence; set when the number changes."""
    prompt_logprobs: Sequence[common_pb2.TokenLogprobs] = ()
    """Entries of the next prompt tokens, if the client asked for them. There is none for the first token.
    All entries come before the first generated token, in order, each once."""

    def as_first(self, request: "Request") -> "Event":
        """Returns the same event as the first of ``request``."""
        started = request.delivery.first_scheduled_s
        return replace(
            self, first=True, seed=request.sampling.params.seed, num_prompt_tokens=request.num_prompt_tokens, num_cached_tokens=request.kv.num_cached,
            queue_s=0.0 if started is None else started - request.delivery.accepted_s,
            lora_digest="" if request.adapter is None else request.adapter.digest,
            replica_id=request.replica_id or "",
        )  # fmt: skip


TokenColumns: TypeAlias = tuple[Sequence[str], Sequence[int]]
"""Request ids and, in the same order, a new token of each: the most frequent events, in columns."""


class Sink(Protocol):
    """Receives a request's events. Must not block and must not call back into the scheduler."""

    def push(self, event: Event) -> None:
        """Takes an event, in order."""

    def push_tokens(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        """Does the same as ``push(Event(request_id, (token_id,)))`` for each pair; may keep the sequences."""


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The live sequences of a client request."""

    request_id: str
    """The client's id of the request."""
    sink: Sink
    """Receives the events of all sequences."""
    members: list["Request"] = field(default_factory=list)
    announced: bool = False
    """Whether the client received the facts about the prompt."""
    failed: bool = False
    """Whether a sequence failed, and with it the request; the others send no more events."""
    ends: list[tuple[str, int, float | None]] = field(default_factory=list)
    """For the log, of each sequence that has ended: how, its tokens, and the time of its first token."""


class SequenceSink:
    """Turns a sequence's events into events of its client request."""

    __slots__ = ("_group", "_sequence")

    def __init__(self, group: SequenceGroup, sequence: int) -> None:
        """Passes the events of ``sequence`` on to the group's sink."""
        self._group = group
        self._sequence = sequence

    def push(self, event: Event) -> None:
        """Passes an event on unless the request failed; a group sends a single first event."""
        group = self._group
        if group.failed:
            return
        first = event.first and not group.announced
        group.announced = group.announced or event.first
        group.failed = event.error is not None
        group.sink.push(replace(event, request_id=group.request_id, sequence=self._sequence, first=first))

    def push_tokens(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        """Passes each token on; see ``Sink``."""
        del request_ids  # the client knows its request by another id
        group = self._group
        for token_id in token_ids:
            if not group.failed:
                group.sink.push(Event(group.request_id, (token_id,), sequence=self._sequence))


@dataclass(slots=True)
class Delivery:
    """The progress of a request's output to its client."""

    accepted_s: float = 0.0
    """Clock reading when this scheduler accepted the request."""
    announced: bool = False
    """Whether the client received an event."""
    num_prompt_logprobs: int = 0
    """Prompt log-probabilities sent; a preempted request computes its prompt, and them, again."""
    first_scheduled_s: float | None = None
    """Clock reading when the request first got a slot."""
    first_token_s: float | None = None
    """Clock reading when the first token came."""
    num_preemptions: int = 0
    """How often the request lost its slot and waited again."""
    silent_since_s: float | None = None
    """Clock reading of the last token before the request was resumed; None if it was not."""


@dataclass(slots=True, eq=False)
class Request:
    """A sequence to generate (or an input to pool), and the scheduler's state for it.

    Token positions, half open::

        [0, num_prompt_tokens)                  prompt, given by the client
        [num_prompt_tokens, len(token_ids))     generated so far
        [0, kv.num_computed)                    KV is in the blocks of `kv`
        [kv.num_computed, len(token_ids))       still to be computed; one token while decoding
    """

    request_id: str
    """Unique among live requests, also within a group."""
    token_ids: list[int]
    """Prompt and output."""
    # The step loop reads `token_ids` and the next two fields once per token: they lie together in memory.
    end: int = field(init=False)
    """Longest length of the sequence; a copy from ``stop`` for the step loop."""
    stop_ids: frozenset[int] = field(init=False)
    """Tokens that may end the sequence; a copy from ``stop``."""
    kv: SequenceKv = field(init=False)
    """The sequence's KV memory; shares `token_ids`."""
    num_prompt_tokens: int
    sampling: Sampling
    arrival: int
    """Order of arrival; unique."""
    arrival_s: float
    """Clock reading at arrival, seconds. A resumed request keeps its age."""
    waits_since_s: float = field(default=0.0, init=False)
    """Clock reading since which the request waits for a slot, or waited for the last one."""
    sink: Sink
    stop: StopRule
    priority: int = 0
    """Lower runs earlier."""
    tenant: str = ""
    """The tenant to charge for the tokens served."""
    charged: bool = False
    """Whether the tenant was charged for the known tokens; computing them again costs it nothing."""
    cache_salt: InitVar[str] = ""
    """Requests with different salts never share KV."""
    adapter: Adapter | None = None
    """The request's LoRA adapter, kept to its end; None for the base model."""
    adapter_load: int = 0
    """The adapter's load on the worker, while the request occupies a slot; 0 for the base model."""
    pooling: common_pb2.PoolingParams | None = None
    """Set for pooling models, which generate nothing."""
    sequence: int = 0
    """Index of the sequence within the client's request."""
    group: SequenceGroup | None = None
    """The sequences of the client's request, if there are several."""
    rank: tuple[float, int] = (0.0, 0)
    """Place among running requests, the smallest first; the order policy sets it once."""
    state: RequestState = RequestState.WAITING
    slot: int | None = None
    """Row in the worker's persistent batch; None without a slot."""
    replica_id: str | None = None
    """The replica that runs the request, or ran it last."""
    granted: int = 0
    """While its known tokens are prefilled: those computed once all chunks that were sent have run."""
    prefills_forced: bool = False
    """Whether the grammar forced the tokens to prefill, after decoded tokens."""
    worker_losses: int = 0
    """Workers lost in a row while they ran the request. Above 0 it is a suspect, and its steps contain no
    other request."""
    step_failures: int = 0
    """Failed steps in a row with the request in them; above 0 it is also a suspect."""
    failed_on: set[str] = field(default_factory=set)
    """The replicas that failed these steps. The request runs elsewhere if it can."""
    num_grammar_losses: int = 0
    """Admissions in a row, without a token between them, for which a worker lacked the grammar."""
    grammar_lost_at: int = -1
    """The request's tokens at the last of them."""
    cleared_at: int = 0
    """Computed tokens with which a chunk clears the suspect; a decode step always does."""
    delivery: Delivery = field(default_factory=Delivery)
    """The client's progress."""
    trace: RequestTrace | None = None
    """Its spans, if it is sampled and this service writes spans."""
    traceparent: str = ""
    """Parent of the worker's spans; empty: it writes none."""

    def __post_init__(self, cache_salt: str) -> None:
        # The log-probabilities of a prompt come with its computation, so no part of it may be a prefix hit.
        self.end = self.num_prompt_tokens + self.stop.max_tokens
        self.stop_ids = self.stop.stop_ids
        reuse_prefix = not self.sampling.reports_prompt
        self.kv = SequenceKv(self.token_ids, cache_salt, self.adapter, reuse_prefix)

    @property
    def num_to_prefill(self) -> int:
        """Known tokens left to prefill; a sequence that can fork runs the last in a decode step."""
        return len(self.token_ids) - self.can_fork - self.kv.num_computed

    @property
    def num_ungranted(self) -> int:
        """Those of them that no chunk was sent for."""
        return len(self.token_ids) - self.can_fork - self.granted

    @property
    def suspect(self) -> bool:
        """Whether the request may have killed a worker or made a step fail."""
        return self.worker_losses > 0 or self.step_failures > 0

    def clear(self) -> None:
        """Clears the suspect: a step of its own was answered."""
        told = self.worker_losses > 0
        self.worker_losses = self.step_failures = self.cleared_at = 0
        self.failed_on.clear()
        if told:
            self.sink.push(Event(self.request_id, worker_losses=0))

    def finish(self, event: Event, now_s: float) -> None:
        """Ends the sequence with its last event: in its spans, in the log and for its client."""
        self.state = RequestState.FINISHED
        self._log_end(event, now_s)
        self.sink.push(event)

    def _log_end(self, event: Event, now_s: float) -> None:
        """Writes the sequence's spans and, after the last sequence of a client request, a line in the log.

        A call of a pooling model logs a single line for all its requests, elsewhere.
        """
        self._end_trace(event, now_s)
        if self.pooling is not None:
            return
        delivery, group = self.delivery, self.group
        ends = [] if group is None else group.ends
        ends.append((_outcome(event), self.num_output_tokens, delivery.first_token_s))
        if group is not None and len(group.members) > 1:
            return
        first_s = min((time for _, _, time in ends if time is not None), default=None)
        get_logger().info(
            "request",
            request_id=self.request_id if group is None else group.request_id,
            replica=self.replica_id,
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=sum(tokens for _, tokens, _ in ends),
            queue_ms=_ms(delivery.accepted_s, delivery.first_scheduled_s),
            ttft_ms=_ms(delivery.accepted_s, first_s),
            ms=_ms(delivery.accepted_s, now_s),
            finish_reason=",".join(dict.fromkeys(outcome for outcome, _, _ in ends)),
        )

    def _end_trace(self, event: Event, now_s: float) -> None:
        if self.trace is None:
            return
        params, delivery = self.sampling.params, self.delivery
        attributes: dict[str, str | int | float] = {
            "gen_ai.request.id": self.request_id,
            "gen_ai.request.max_tokens": self.stop.max_tokens,
            "gen_ai.request.temperature": params.temperature if params.HasField("temperature") else 1.0,
            "gen_ai.request.top_p": params.top_p if params.HasField("top_p") else 1.0,
            "gen_ai.usage.prompt_tokens": self.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": self.num_output_tokens,
            "gen_ai.latency.e2e": now_s - delivery.accepted_s,
            "triptych.cached_tokens": self.kv.num_cached,
            "triptych.preemptions": delivery.num_preemptions,
            "triptych.replica_id": self.replica_id or "",
            "triptych.finish_reason": "error" if event.finish_reason is None else _outcome(event),
        }
        started_s, first_s = delivery.first_scheduled_s, delivery.first_token_s
        if started_s is not None:
            attributes["gen_ai.latency.time_in_queue"] = started_s - delivery.accepted_s
            attributes["gen_ai.latency.time_in_model_inference"] = now_s - started_s
        if first_s is not None:
            attributes["gen_ai.latency.time_to_first_token"] = first_s - delivery.accepted_s
            attributes["gen_ai.latency.time_in_model_decode"] = now_s - first_s
        # Messages may quote the client; the kind of error does not.
        self.trace.end(now_s, attributes, type(event.error).__name__ if event.error is not None else "")
        self.trace = None

    @property
    def can_fork(self) -> bool:
        """Whether only the prompt shared with the group is known."""
        return self.group is not None and len(self.token_ids) == self.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, resumed tokens included."""
        return len(self.token_ids) - self.num_prompt_tokens


def _outcome(event: Event) -> str:
    """Returns how a last event ends a sequence: `stop`, `length`, `abort` or the code of its error."""
    if event.error is not None:
        return event.error.code_name
    assert event.finish_reason is not None
    return event.finish_reason.name.lower()


def _ms(since_s: float, until_s: float | None) -> float | None:
    return None if until_s is None else round((until_s - since_s) * 1000, 1)
