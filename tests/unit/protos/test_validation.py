"""Validation of requests: every bound in the schema is enforced, by name, with the value that was sent."""

import math
from typing import Any

import pytest

from protos.errors import InvalidArgument
from protos.limits import MAX_GRAMMAR_BYTES, SAMPLING
from protos.triptych.v1 import common_pb2, inference_pb2
from protos.validation import check_fields, check_generate, check_pool, check_token_ids, requested_features
from tests.support.sampling_params import sampling_params


def request(**sampling: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(prompt_token_ids=[1, 2], sampling=sampling_params(**sampling))


def refusal(message: inference_pb2.GenerateRequest) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        check_generate(message)
    assert "\n" not in caught.value.message
    return caught.value


SCALARS = [name for name, bounds in SAMPLING.items() if bounds.HasField("min") and not bounds.max_items]


@pytest.mark.parametrize("name", SCALARS)
def test_values_at_the_bounds_are_accepted(name: str) -> None:
    """The bounds themselves are legal unless the schema excludes the lower one."""
    bounds = SAMPLING[name]
    limits = [] if bounds.above_min else [bounds.min]
    limits += [bounds.max] if bounds.HasField("max") else []
    for value in limits:
        check_generate(request(**{name: int(value) if name == "max_tokens" else value}))


@pytest.mark.parametrize("name", SCALARS)
def test_values_beyond_the_bounds_are_refused_by_name(name: str) -> None:
    bounds = SAMPLING[name]
    beyond: list[float] = [0] if name == "max_tokens" else [bounds.min - 0.5, math.nan]
    if bounds.above_min:
        beyond.append(bounds.min)
    if bounds.HasField("max"):
        beyond.append(bounds.max + 0.5)
    for value in beyond:
        error = refusal(request(**{name: value}))
        assert error.param == name
        assert error.message.startswith(f"{name} must be ")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, not 0"),
        ({"temperature": -1.0}, "temperature must be between 0 and 100, not -1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"logit_bias": {7: 101.0}}, "logit_bias must be between -100 and 100, not 101"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias takes at most 1024 entries, got 1025"),
        ({"stop_token_ids": range(257)}, "stop_token_ids takes at most 256 entries, got 257"),
        ({"bad_words": [()]}, "each of bad_words must have 1 to 32 tokens"),
        ({"bad_words": [(5,), range(33)]}, "each of bad_words must have 1 to 32 tokens"),
        ({"bad_words": [(5,)] * 513}, "bad_words takes at most 512 entries, got 513"),
        ({"structured_output": common_pb2.StructuredOutput()}, "structured_output is empty"),
        ({"structured_output": common_pb2.StructuredOutput(json_object=False)}, "structured_output is empty"),
        ({"structured_output": common_pb2.StructuredOutput(regex="a" * MAX_GRAMMAR_BYTES)}, "bytes; at most 262144"),
    ],
)  # fmt: skip
def test_sampling_parameters_are_refused_in_one_line(fields: dict[str, Any], text: str) -> None:
    assert text in refusal(request(**fields)).message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"tenant": "ü" * 129}, "tenant"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 2, "resumed": [inference_pb2.ResumedSequence(sequence=2)]}, "resumed"),
        ({"resumed": [inference_pb2.ResumedSequence()] * 2}, "resumed"),
        ({"n": 128, "resumed": [inference_pb2.ResumedSequence()] * 129}, "resumed"),
        ({"resumed": [inference_pb2.ResumedSequence(finished=True)]}, "resumed"),
    ],
)
def test_requests_are_refused_by_field(fields: dict[str, Any], param: str) -> None:
    message = inference_pb2.GenerateRequest(**{"prompt_token_ids": [1], **fields})
    assert refusal(message).param == param


def test_a_pooling_request_is_checked_the_same_way() -> None:
    check_pool(inference_pb2.PoolRequest(prompt_token_ids=[1]))
    for fields in ({}, {"prompt_token_ids": [1], "tenant": "x" * 257}, {"prompt_token_ids": [1], "task": 77}):
        with pytest.raises(InvalidArgument):
            check_pool(inference_pb2.PoolRequest(**fields))


def test_the_entries_of_a_call_are_counted() -> None:
    """Their own fields can be left to the check of each entry."""
    entry = inference_pb2.PoolRequest()
    with pytest.raises(InvalidArgument, match="requests is empty; send at least one entry"):
        check_fields(inference_pb2.PoolAllRequest(), entries=False)
    with pytest.raises(InvalidArgument, match="requests takes at most 256 entries, got 257"):
        check_fields(inference_pb2.PoolAllRequest(requests=[entry] * 257), entries=False)
    check_fields(inference_pb2.PoolAllRequest(requests=[entry] * 256), entries=False)


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": [50]},
        {"allowed_token_ids": [3, 50]},
        {"logit_bias": {50: 1.0}},
        {"bad_words": [(3,), (4, 50)]},
    ],
)
def test_token_ids_beyond_the_vocabulary_are_refused_by_name(fields: dict[str, Any]) -> None:
    """The check covers every field that the schema marks, nested ones included."""
    check_token_ids(request(**fields), 51)
    with pytest.raises(InvalidArgument, match="the token id 50; this model's ids end at 49") as caught:
        check_token_ids(request(**fields), 50)
    assert caught.value.param == next(iter(fields))


def test_a_worker_needs_to_support_only_parameters_that_have_an_effect() -> None:
    """Values that switch a parameter off need no support, and the scheduler itself stops sequences."""
    off = sampling_params(
        top_k=0, presence_penalty=0.0, frequency_penalty=-0.0, repetition_penalty=1.0, max_tokens=5, stop_token_ids=[3],
        ignore_eos=True,
    )  # fmt: skip
    assert requested_features(off) == frozenset()
    on = sampling_params(temperature=0.0, seed=0, logprobs=0, bad_words=[(1,)], repetition_penalty=1.5)
    assert requested_features(on) == {"temperature", "seed", "logprobs", "bad_words", "repetition_penalty"}


def test_every_sampling_parameter_has_bounds_or_none_to_have() -> None:
    """A new parameter must say whether workers have to support it."""
    without = {field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields} - SAMPLING.keys()
    assert without == {"ignore_eos", "seed_is_drawn"}
