"""The one rule for when a sequence ends, for generated tokens and for sequences that a client resumes.

A token ends its sequence if it is a stop token or an end token of the model, and the sequence has its minimum
number of tokens. A completed grammar ends the sequence in any case, because nothing else can follow it.
"""

from scheduler_svc.requests.request import FinishReason, Request
from scheduler_svc.requests.sampling import Sampling


def stop_ids(sampling: Sampling, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Returns the tokens that end a sequence. A grammar overrules ``ignore_eos``."""
    if sampling.ignore_eos and sampling.grammar is None:
        return sampling.stop_token_ids
    return sampling.stop_token_ids | eos_token_ids


def is_full(num_output_tokens: int, max_tokens: int) -> bool:
    """Whether a sequence has all the tokens that it may have."""
    return num_output_tokens >= max_tokens


def finish_reason(request: Request, token_id: int) -> FinishReason | None:
    """Returns why ``token_id``, just appended, ends the sequence; None if it does not."""
    if token_id in request.stop_ids:
        sampling = request.sampling
        if request.num_output_tokens >= sampling.min_tokens:
            return FinishReason.STOP
        if sampling.grammar is not None and token_id in request.end_ids:
            return FinishReason.STOP
    return FinishReason.LENGTH if len(request.token_ids) >= request.end else None
