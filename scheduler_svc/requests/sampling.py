"""The sampling parameters read by the scheduler, and the rule for the end of a sequence."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final, Self

from protos.triptych.v1 import common_pb2

# A plan names each request with its slot, id and numbers.
_BYTES_AROUND = 512


@dataclass(frozen=True, slots=True)
class Grammar:
    """A serialized ``StructuredOutput`` to be matched by an output. The scheduler does not parse it."""

    serialized: bytes = field(compare=False, repr=False)
    """Up to ``MAX_GRAMMAR_BYTES``, so grammars are compared by ``key``."""
    key: bytes = field(init=False)
    """Digest of ``serialized``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", blake2b(self.serialized, digest_size=32).digest())


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters on their way to a worker: the message, and the values read by the scheduler."""

    params: common_pb2.SamplingParams
    """The validated message, with its seed set. Never changed: requests share it."""
    grammar: Grammar | None = field(default=None, compare=False)
    """The grammar of the output, as in ``params``; None for any text."""
    max_tokens: int = field(init=False, compare=False)
    """New tokens, at most; 0 if the client set no limit."""
    min_tokens: int = field(init=False, compare=False)
    """End tokens do not end the sequence before this many new tokens."""
    stop_token_ids: frozenset[int] = field(init=False, compare=False)
    """Tokens that end the sequence, in addition to the model's end tokens."""
    ignore_eos: bool = field(init=False, compare=False)
    """Whether the model's end tokens do not end the sequence."""
    reports_prompt: bool = field(init=False, compare=False)
    """Whether the client wants the prompt's log-probabilities; all of the prompt must then be computed."""
    num_bytes: int = field(init=False, compare=False)
    """Size of the parameters in a plan, an upper bound."""

    def __post_init__(self) -> None:
        params, grammar = self.params, self.grammar
        if grammar is None and params.HasField("structured_output"):
            grammar = Grammar(params.structured_output.SerializeToString(deterministic=True))
        read = {
            "max_tokens": params.max_tokens,
            "min_tokens": params.min_tokens,
            "stop_token_ids": frozenset(params.stop_token_ids),
            "ignore_eos": params.ignore_eos,
            "reports_prompt": params.HasField("prompt_logprobs"),
            "grammar": grammar,
            "num_bytes": params.ByteSize() + _BYTES_AROUND,
        }
        for name, value in read.items():
            object.__setattr__(self, name, value)

    def changed(self, **fields: Any) -> Self:
        """Returns a copy with some scalar fields set, or cleared where the value is None."""
        params = common_pb2.SamplingParams()
        params.CopyFrom(self.params)
        for name, value in fields.items():
            if value is None:
                params.ClearField(name)  # type: ignore[arg-type] # any field's name
            else:
                setattr(params, name, value)
        return type(self)(params, self.grammar)


NO_SAMPLING: Final = Sampling(common_pb2.SamplingParams())
"""The parameters of a pooling request, which samples nothing."""


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
    """Decides whether a token is the last of its sequence.

    The gateway looks for stop strings, which are text, and aborts their sequences.
    """

    stop_ids: frozenset[int]
    """Tokens that may end the sequence: the client's stop tokens and, unless ignored, the model's end
    tokens."""
    grammar_end_ids: frozenset[int]
    """Tokens that end the sequence even before ``min_tokens``: the model's end tokens if the request has a
    grammar. A worker samples them only after a completed grammar, where nothing else can follow."""
    min_tokens: int
    """New tokens before which ``stop_ids`` do not end the sequence."""
    max_tokens: int
    """New tokens, at most."""

    @classmethod
    def from_sampling(cls, sampling: Sampling, eos_token_ids: frozenset[int], max_tokens: int) -> Self:
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
        """Returns why a received sequence ended; None if it goes on."""
        return self.reason(token_ids[-1], len(token_ids)) if token_ids else None
