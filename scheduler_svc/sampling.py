"""What the scheduler keeps of a request's sampling parameters."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must match: a message for workers, which this service does not look into."""

    serialized: bytes


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
        grammar: what the output must match, as the worker gets it; None for anything.
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
    grammar: Grammar | None = None


NOTHING_SAMPLED = SamplingParams(
    temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, max_tokens=0, stop_token_ids=frozenset(),
    ignore_eos=True, logprobs=None,
)  # fmt: skip
"""Of a request whose model generates nothing."""
