"""The part of a request's sampling parameters that the scheduler reads."""

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Self

from protos.triptych.v1 import common_pb2

# A plan names each request with its slot, id and numbers.
_BYTES_AROUND = 512


@dataclass(frozen=True, slots=True)
class Grammar:
    """A serialized ``StructuredOutput`` that an output must match. The scheduler does not parse it."""

    serialized: bytes = field(compare=False, repr=False)
    """Up to ``MAX_GRAMMAR_BYTES``, so grammars are compared by ``key``."""
    key: bytes = field(init=False)
    """Digest of ``serialized``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", blake2b(self.serialized, digest_size=32).digest())


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters on their way to a worker: the message, and the values that the scheduler reads."""

    params: common_pb2.SamplingParams
    """The validated message, with its seed set. Never changed: requests share it."""
    grammar: Grammar | None = field(default=None, compare=False)
    """The grammar that the output must match, as in ``params``; None for any text."""
    max_tokens: int = field(init=False, compare=False)
    """New tokens, at most; 0 if the client set no limit."""
    min_tokens: int = field(init=False, compare=False)
    """End tokens do not end the sequence before this many new tokens."""
    stop_token_ids: frozenset[int] = field(init=False, compare=False)
    """Tokens that end the sequence, beside the model's own end tokens."""
    ignore_eos: bool = field(init=False, compare=False)
    """Whether the model's end tokens do not end the sequence."""
    reports_prompt: bool = field(init=False, compare=False)
    """Whether the client wants the prompt's log-probabilities, so that all of the prompt must be computed."""
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
