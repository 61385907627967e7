"""Sampling parameters: what a client asks for, checked and complete, and what a worker is told."""

import math
import secrets
from collections.abc import Sequence
from typing import Any

from protos.errors import InvalidArgument
from protos.triptych.v1 import common_pb2
from protos.wire import MAX_GRAMMAR_BYTES
from scheduler_svc.requests.sampling import Grammar, SamplingParams

# Far more than is asked for in earnest, few enough that a request does not hold everybody up here, and no more than a worker's tables take
# (worker_svc/sampling/state.py). A gateway makes one or two of each word that is not to come.
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 512
MAX_BAD_WORD_TOKENS = 32
# Twice the largest vocabularies.
MAX_ALLOWED_TOKEN_IDS = 1 << 19
# No model says anything sensible beyond; vLLM has no bound.
MAX_REPETITION_PENALTY = 10.0

# Dividing logits by less overflows float32. Down to here temperatures are served as they are; vLLM raises those below 0.01 to that.
_GREEDY_BELOW = 1e-5

# Parameters that need the worker's help. Of these any value does, if it is sent at all.
_ASKED_BY_PRESENCE = ("temperature", "top_p", "min_p", "seed", "logprobs", "prompt_logprobs")
# These are off at the given values; 0 is what an absent repetition_penalty reads as, and refused if it is sent.
_OFF: dict[str, tuple[float, ...]] = {
    "top_k": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (0.0, 1.0),
}
_COLLECTIONS = ("logit_bias", "allowed_token_ids", "bad_words")


def sampling_from_proto(sampling: common_pb2.SamplingParams) -> SamplingParams:
    """What a client asks for, complete but for an absent ``max_tokens``, which is 0.

    Raises:
        InvalidArgument: naming the field, its bounds and what was sent.
    """
    temperature = _bounded(sampling, "temperature", 1.0, 0.0, 100.0)
    if temperature < _GREEDY_BELOW:
        temperature = 0.0
    top_p = _bounded(sampling, "top_p", 1.0, 0.0, 1.0)
    if top_p == 0:
        raise InvalidArgument("top_p must be above 0 and at most 1, not 0", param="top_p")
    repetition_penalty = _bounded(sampling, "repetition_penalty", 1.0, 0.0, MAX_REPETITION_PENALTY)
    if repetition_penalty == 0:
        raise InvalidArgument("repetition_penalty must be above 0, not 0", param="repetition_penalty")
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=sampling.top_k,
        min_p=_bounded(sampling, "min_p", 0.0, 0.0, 1.0),
        # Drawn once: a replay after a lost worker must continue with the same random numbers.
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(63),
        max_tokens=sampling.max_tokens,
        stop_token_ids=frozenset(_few(sampling, "stop_token_ids", MAX_STOP_TOKEN_IDS)),
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        min_tokens=sampling.min_tokens,
        presence_penalty=_in_range("presence_penalty", sampling.presence_penalty, -2.0, 2.0),
        frequency_penalty=_in_range("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0),
        repetition_penalty=repetition_penalty,
        logit_bias=tuple(
            (token, _in_range("logit_bias", bias, -100.0, 100.0))
            for token, bias in _few(sampling, "logit_bias", MAX_LOGIT_BIASES).items()
        ),
        allowed_token_ids=tuple(sorted(set(_few(sampling, "allowed_token_ids", MAX_ALLOWED_TOKEN_IDS)))),
        bad_words=_bad_words_from_proto(_few(sampling, "bad_words", MAX_BAD_WORDS)),
        prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
        grammar=_grammar_from_proto(sampling.structured_output)
        if sampling.HasField("structured_output")
        else None,
    )


def _few(sampling: common_pb2.SamplingParams, name: str, most: int) -> Any:
    values = getattr(sampling, name)
    if len(values) > most:
        raise InvalidArgument(f"{name} takes at most {most} entries, got {len(values)}", param=name)
    return values


def _bad_words_from_proto(words: Sequence[common_pb2.TokenSequence]) -> tuple[tuple[int, ...], ...]:
    lengths = [len(word.token_ids) for word in words]
    if lengths and not 1 <= min(lengths) <= max(lengths) <= MAX_BAD_WORD_TOKENS:
        raise InvalidArgument(
            f"each of bad_words must have 1 to {MAX_BAD_WORD_TOKENS} tokens", param="bad_words"
        )
    return tuple(tuple(word.token_ids) for word in words)


def _grammar_from_proto(structured: common_pb2.StructuredOutput) -> Grammar:
    kind = structured.WhichOneof("spec")
    if kind is None or (kind == "json_object" and not structured.json_object):
        raise InvalidArgument(
            "structured_output is empty; set json_schema, json_object, regex, grammar, choice or structural_tag",
            param="structured_output",
        )
    if structured.ByteSize() > MAX_GRAMMAR_BYTES:
        raise InvalidArgument(
            f"{kind} has {structured.ByteSize()} bytes; at most {MAX_GRAMMAR_BYTES} are taken",
            param="structured_output",
        )
    return Grammar(structured.SerializeToString(deterministic=True))


def grammar_to_proto(grammar: Grammar) -> common_pb2.StructuredOutput:
    """What an output must match, for a worker."""
    return common_pb2.StructuredOutput.FromString(grammar.serialized)


def _bounded(
    sampling: common_pb2.SamplingParams, name: str, default: float, low: float, high: float
) -> float:
    return _in_range(name, float(getattr(sampling, name)) if sampling.HasField(name) else default, low, high)  # type: ignore[arg-type]


def _in_range(name: str, value: float, low: float, high: float) -> float:
    if math.isnan(value) or not low <= value <= high:
        raise InvalidArgument(f"{name} must be between {low:g} and {high:g}, not {value:g}", param=name)
    return value


def set_fields(sampling: common_pb2.SamplingParams) -> frozenset[str]:
    """Names of the parameters that ask something of the worker."""
    fields = {name for name in _ASKED_BY_PRESENCE if sampling.HasField(name)}  # type: ignore[arg-type]
    fields.update(name for name, off in _OFF.items() if getattr(sampling, name) not in off)
    fields.update(name for name in _COLLECTIONS if getattr(sampling, name))
    if sampling.HasField("structured_output"):
        fields.add("structured_output")
    return frozenset(fields)


def sampling_to_proto(sampling: SamplingParams) -> common_pb2.SamplingParams:
    """The same for a worker."""
    message = common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sorted(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=[common_pb2.TokenSequence(token_ids=word) for word in sampling.bad_words],
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        structured_output=grammar_to_proto(sampling.grammar) if sampling.grammar else None,
    )
    if sampling.repetition_penalty != 1.0:
        message.repetition_penalty = sampling.repetition_penalty
    return message
