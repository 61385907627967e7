"""The one rule for when a sequence ends, for new tokens and for resumed sequences."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from scheduler_svc.requests.sampling import Sampling


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = enum.auto()
    """At an end token or a stop token."""
    LENGTH = enum.auto()
    """At its length limit, or the context's."""
    ABORT = enum.auto()
    """The client aborted the request or disconnected."""


@dataclass(frozen=True, slots=True)
class StopRule:
    """Decides whether a token is the last one of its sequence.

    Stop strings are text, so the gateway looks for them; it aborts the sequence when it finds one.
    """

    stop_ids: frozenset[int]
    """Tokens that may end the sequence: the client's stop tokens and, unless ignored, the model's end
    tokens."""
    grammar_end_ids: frozenset[int]
    """Tokens that end the sequence even before ``min_tokens``: the model's end tokens if the request has a
    grammar. A worker samples them only behind a completed grammar, where nothing else can follow."""
    min_tokens: int
    """New tokens before which ``stop_ids`` do not end the sequence."""
    max_tokens: int
    """New tokens, at most."""

    @classmethod
    def of(cls, sampling: Sampling, eos_token_ids: frozenset[int], max_tokens: int) -> Self:
        """Returns the rule of a request with these sampling parameters, limit and end tokens of the model."""
        constrained = sampling.grammar is not None
        heeds_eos = constrained or not sampling.ignore_eos
        return cls(
            stop_ids=sampling.stop_token_ids | eos_token_ids if heeds_eos else sampling.stop_token_ids,
            grammar_end_ids=eos_token_ids if constrained else frozenset(),
            min_tokens=sampling.min_tokens,
            max_tokens=max_tokens,
        )

    def reason(self, token: int, count: int) -> FinishReason | None:
        """Returns why a sequence ends with its ``count``-th new token; None if it goes on."""
        if token in self.stop_ids and (count >= self.min_tokens or token in self.grammar_end_ids):
            return FinishReason.STOP
        return FinishReason.LENGTH if count >= self.max_tokens else None

    def reason_of(self, token_ids: Sequence[int]) -> FinishReason | None:
        """Returns why a sequence that a client has received has ended; None if it goes on."""
        return self.reason(token_ids[-1], len(token_ids)) if token_ids else None
