"""What the scheduler keeps of a request's sampling parameters."""

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

BYTES_PER_ID: Final = 4
"""Of a token id on the wire, at most: ids are below 2**28."""
# Of a bias: a map's entry with a float; of a bad word: what is around its tokens; of the rest: numbers and names.
_BYTES_PER_BIAS, _BYTES_PER_WORD, _BYTES_AROUND = 16, 8, 512


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must match: a message for workers, which this service does not look into.

    Attributes:
        serialized: the message; up to ``MAX_GRAMMAR_BYTES``, so it is not what is compared.
        key: its digest.
    """

    serialized: bytes = field(compare=False, repr=False)
    key: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", blake2b(self.serialized, digest_size=32).digest())


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a sequence ends. Validated and complete: nothing here means "default".

    Attributes:
        temperature: 0 is greedy.
        top_p: nucleus mass in (0, 1]; 1 is off.
        top_k: likeliest tokens kept; 0 is off.
        min_p: least probability relative to the likeliest token; 0 is off.
        seed: of the counter-based random numbers.
        max_tokens: new tokens at most.
        stop_token_ids: tokens that end the sequence beside the model's own end tokens.
        ignore_eos: do not end at the model's end tokens.
        logprobs: None for none, else the number of likeliest tokens reported beside the chosen one.
        min_tokens: end tokens are not sampled before that many new tokens.
        presence_penalty, frequency_penalty: in [-2, 2]; 0 is off.
        repetition_penalty: above 0; 1 is off.
        logit_bias: (token id, what is added to its logit), each token once.
        allowed_token_ids: the only tokens that may be sampled; empty: all.
        bad_words: token sequences that must not be produced.
        prompt_logprobs: as ``logprobs``, for the prompt's tokens.
        grammar: what the output must match, as the worker gets it; None for anything.
        weight: about their bytes on the wire, rather more than less.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    logprobs: int | None
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    weight: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ids = (self.stop_token_ids, self.allowed_token_ids, *self.bad_words)
        weight = _BYTES_AROUND + BYTES_PER_ID * sum(map(len, ids))
        weight += _BYTES_PER_BIAS * len(self.logit_bias) + _BYTES_PER_WORD * len(self.bad_words)
        object.__setattr__(self, "weight", weight + (len(self.grammar.serialized) if self.grammar else 0))


NOTHING_SAMPLED = SamplingParams(
    temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, max_tokens=0, stop_token_ids=frozenset(),
    ignore_eos=True, logprobs=None,
)  # fmt: skip
"""Of a request whose model generates nothing."""
