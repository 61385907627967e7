"""A request as the scheduler sees it."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from protos.errors import TriptychError
from scheduler_svc.kv.groups.base import Table
from scheduler_svc.kv.prefix_hash import KeyChain, Media
from scheduler_svc.requests.sampling import SamplingParams

if TYPE_CHECKING:
    from scheduler_svc.requests.sequence_group import Family


class RequestState(enum.Enum):
    """Where a request is in its life."""

    WAITING = enum.auto()
    WAITING_FOR_FSM = enum.auto()
    """Waiting until a replica has compiled its grammar."""
    DEFERRED = enum.auto()
    """Waiting for another request to compute the prefix that both share."""
    PREFILLING = enum.auto()
    DECODING = enum.auto()
    FINISHED = enum.auto()


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = enum.auto()
    LENGTH = enum.auto()
    ABORT = enum.auto()


class PoolTask(enum.Enum):
    """What the result of a pooling model is for."""

    EMBED = "embed"
    CLASSIFY = "classify"
    SCORE = "score"


@dataclass(frozen=True, slots=True)
class Pooling:
    """What is made of a pooling request's result.

    Attributes:
        task: what it is for.
        normalize: whether an embedding is scaled to length 1; None: as the model says.
    """

    task: PoolTask
    normalize: bool | None = None


@dataclass(frozen=True, slots=True)
class Logprobs:
    """One token's log-probabilities.

    Attributes:
        logprob: the sampled token's, natural logarithm.
        rank: its 1-based rank in the vocabulary.
        top: the likeliest tokens with theirs, best first.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Event:
    """What is new about a request: what a client is told.

    Attributes:
        request_id: whose.
        sequence: which of the request's sequences.
        token_ids: new tokens.
        logprobs: one per new token if asked for, else empty.
        finish_reason: set in the last event.
        stop_token_id: the token that ended the sequence, if one did.
        first: whether this is the request's first event.
        num_prompt_tokens, num_cached_tokens, queue_s: about the prompt; meaningful in the first event.
        error: the request failed; nothing follows.
        pooled: a pooling request's result, row-major.
        prompt_logprobs: those of the prompt's next tokens, if asked for: of all but the first one, in order, none of them twice, before
            the first token.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    first: bool = False
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    queue_s: float = 0.0
    error: TriptychError | None = None
    pooled: Sequence[float] = ()
    sequence: int = 0
    prompt_logprobs: tuple[Logprobs, ...] = ()

    def announcing(self, request: "Request") -> "Event":
        """The same event as a request's first one."""
        started = request.arrival_s if request.first_scheduled_s is None else request.first_scheduled_s
        return replace(
            self, first=True, num_prompt_tokens=request.num_prompt_tokens, num_cached_tokens=request.num_cached,
            queue_s=started - request.arrival_s,
        )  # fmt: skip


class Sink(Protocol):
    """Where a request's events go. Must not block and must not call back into the scheduler."""

    def push(self, event: Event) -> None:
        """Takes one event, in order."""

    def push_token(self, request_id: str, token_id: int) -> None:
        """The same as ``push(Event(request_id, (token_id,)))``, for the one event that there are thousands of a second of."""


@dataclass(slots=True, eq=False)
class Request:
    """One request and everything the scheduler has decided about it.

    Who owns which tokens (positions, half open)::

        [0, num_prompt_tokens)                  prompt, given by the client
        [num_prompt_tokens, len(token_ids))     generated so far
        [0, num_computed)                       KV is in the blocks of `tables`
        [num_computed, len(token_ids))          still to be run; one token while decoding

    Attributes:
        token_ids: prompt and output.
        sampling: validated parameters.
        arrival: order of arrival; unique.
        arrival_s: clock reading at arrival, seconds.
        end: length at which the sequence ends: by its own limit or the context's.
        stop_ids: tokens that end it.
        end_ids: the model's end tokens, which nothing can follow where a grammar is through.
        priority: lower runs earlier.
        rank: its place among running requests, the smallest first; given once, by the order policy.
        tenant: whom to be fair to.
        cache_salt, lora_name, media: what prefixes are told apart by, beside their tokens.
        keys: prefix keys, shared by all groups and kept while the request lives.
        tables: blocks, one table per KV group; empty while waiting.
        slot: row in the worker's persistent batch while running.
        replica_id: where it runs or ran last.
        num_admissions: how often it got a slot.
        num_decodes: how often it began to decode: at the end of a prompt's prefill, and of every jump.
        jumped: whether what it prefills are tokens that its grammar forced, behind others that it decoded.
        num_cached: leading tokens that the last admission found in the prefix cache.
        cache_era: resets of its replica's prefix cache before it was admitted.
        junction: chunk boundary, in granules, at which its prompt leaves those seen before.
        first_scheduled_s: clock reading when it first got a slot.
        first_token_s: clock reading when its first token came.
        announced: whether the client has had an event.
        num_prompt_told: of how many of the prompt's tokens it has had the log-probabilities, which come again when the prompt is computed again.
        pooling: set for a pooling model, which samples nothing.
        sequence: which of the client's request's sequences it is.
        family: the sequences of that request, if it has several.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    arrival: int
    arrival_s: float
    sink: Sink
    end: int
    stop_ids: frozenset[int] = frozenset()
    end_ids: frozenset[int] = frozenset()
    priority: int = 0
    rank: tuple[float, int] = (0.0, 0)
    tenant: str = ""
    cache_salt: str = ""
    lora_name: str = ""
    media: tuple[Media, ...] = ()
    state: RequestState = RequestState.WAITING
    keys: KeyChain | None = None
    tables: list[Table] = field(default_factory=list)
    num_computed: int = 0
    slot: int | None = None
    replica_id: str | None = None
    num_admissions: int = 0
    num_decodes: int = 0
    jumped: bool = False
    num_cached: int = 0
    cache_era: int = 0
    junction: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    announced: bool = False
    num_prompt_told: int = 0
    pooling: Pooling | None = None
    sequence: int = 0
    family: "Family | None" = None

    @property
    def num_to_prefill(self) -> int:
        """Known tokens that prefill has to run still; a sequence that branches off a shared prompt decodes the last one."""
        return len(self.token_ids) - self.branches - self.num_computed

    @property
    def branches(self) -> bool:
        """Whether nothing of it is known but the prompt that it shares with the other sequences of its request."""
        return self.family is not None and len(self.token_ids) == self.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, resumed ones included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def finished(self) -> bool:
        """Whether nothing more will happen to the request."""
        return self.state is RequestState.FINISHED
