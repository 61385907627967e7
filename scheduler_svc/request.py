"""A request as the scheduler sees it."""

import enum
from dataclasses import dataclass, field
from typing import Protocol

from protos.errors import TriptychError
from scheduler_svc.block_pool import Block
from scheduler_svc.prefix_cache import KeyChain
from scheduler_svc.sampling import SamplingParams


class RequestState(enum.Enum):
    """Where a request is in its life."""

    WAITING = enum.auto()
    PREFILLING = enum.auto()
    DECODING = enum.auto()
    FINISHED = enum.auto()


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = enum.auto()
    LENGTH = enum.auto()
    ABORT = enum.auto()


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
        token_ids: new tokens.
        logprobs: one per new token if asked for, else empty.
        finish_reason: set in the last event.
        stop_token_id: the token that ended the sequence, if one did.
        first: whether this is the request's first event.
        num_prompt_tokens, num_cached_tokens, queue_s: about the prompt; meaningful in the first event.
        error: the request failed; nothing follows.
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


class Sink(Protocol):
    """Where a request's events go. Must not block and must not call back into the scheduler."""

    def push(self, event: Event) -> None:
        """Takes one event, in order."""


@dataclass(slots=True, eq=False)
class Request:
    """One request and everything the scheduler has decided about it.

    Who owns which tokens (positions, half open)::

        [0, num_prompt_tokens)                  prompt, given by the client
        [num_prompt_tokens, len(token_ids))     generated so far
        [0, num_computed)                       KV is in `blocks`
        [num_computed, len(token_ids))          still to be run; one token while decoding

    Attributes:
        token_ids: prompt and output.
        sampling: validated parameters.
        arrival: order of arrival; unique.
        arrival_s: clock reading at arrival, seconds.
        priority: lower runs earlier.
        keys: prefix keys; shared by all groups because all have one block size.
        blocks: block table, one list per KV group; empty while waiting.
        slot: row in the worker's persistent batch while running.
        num_cached: leading tokens that the last admission found in the prefix cache.
        first_scheduled_s: clock reading when it first got a slot.
        announced: whether the client has had an event.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    arrival: int
    arrival_s: float
    sink: Sink
    keys: KeyChain | None = None
    priority: int = 0
    cache_salt: str = ""
    state: RequestState = RequestState.WAITING
    num_computed: int = 0
    blocks: list[list[Block]] = field(default_factory=list)
    slot: int | None = None
    num_cached: int = 0
    first_scheduled_s: float | None = None
    announced: bool = False

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, resumed ones included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def finished(self) -> bool:
        """Whether nothing more will happen to the request."""
        return self.state is RequestState.FINISHED
