"""Chooses tokens on the device, for all rows of a step at once, by static functions of [rows, vocab].

What a request asks for lies in tensors with a row per slot (``state``); a step gathers its rows'. The order is vLLM's:

1. log-probabilities are of the logits as the model made them (``report``);
2. ``adjust``: masks (``allowed_token_ids``, grammars), ``bad_words``, ``min_tokens``, ``logit_bias``, penalties;
3. the greedy choice, or: temperature, then ``cut``: ``min_p``, ``top_k``, and ``top_p`` over what is left; then ``draw``.

A step computes what its rows need (``Needs``) and no more: of a batch of greedy rows, the most probable tokens (``likeliest``). Nothing in
here waits for the device, so that all of it can be captured.
"""

from worker_svc.sampling.argmax import likeliest
from worker_svc.sampling.memory import sampling_bytes, state_bytes
from worker_svc.sampling.report import NUM_TOP, report, reports_of
from worker_svc.sampling.sampler import sample
from worker_svc.sampling.state import Needs, SamplingBatch, SamplingState, Vocabulary

__all__ = [
    "NUM_TOP",
    "Needs",
    "SamplingBatch",
    "SamplingState",
    "Vocabulary",
    "likeliest",
    "report",
    "reports_of",
    "sample",
    "sampling_bytes",
    "state_bytes",
]
