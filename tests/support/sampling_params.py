"""Sampling parameters for tests, as the messages that all services use."""

import json
from collections.abc import Sequence
from typing import Any

from protos.triptych.v1 import common_pb2


def sampling_params(*, bad_words: Sequence[Sequence[int]] = (), **fields: Any) -> common_pb2.SamplingParams:
    """Returns a message with these fields; ``bad_words`` are token sequences."""
    words = [common_pb2.TokenSequence(token_ids=word) for word in bad_words]
    return common_pb2.SamplingParams(bad_words=words, **fields)


def complete_params(**fields: Any) -> common_pb2.SamplingParams:
    """Returns a message with a value for each parameter whose default is not 0, for tests that compute."""
    return sampling_params(**{"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, **fields})


def changed(sampling: common_pb2.SamplingParams, **fields: Any) -> common_pb2.SamplingParams:
    """Returns a copy in which these fields have these values."""
    copy = common_pb2.SamplingParams()
    copy.CopyFrom(sampling)
    for name in fields:
        copy.ClearField(name)  # type: ignore[arg-type] # any field's name
    copy.MergeFrom(sampling_params(**fields))
    return copy


def constrained(sampling: common_pb2.SamplingParams, kind: str, text: str) -> common_pb2.SamplingParams:
    """Returns a copy with a grammar; ``kind`` and ``text`` are those of a worker's ``Spec``."""
    copy = changed(sampling)
    match kind:
        case "json_object":
            copy.structured_output.json_object = True
        case "choice":
            copy.structured_output.choice.values.extend(json.loads(text))
        case _:
            setattr(copy.structured_output, kind, text)
    return copy


def thinking_budget(
    tokens: int,
    *,
    opened: bool = True,
    start: Sequence[int] = (3,),
    end: Sequence[int] = (9,),
    close: Sequence[int] = (),
    other_ends: Sequence[Sequence[int]] = (),
) -> common_pb2.ThinkingBudget:
    """Returns a budget; by default the worker writes the end alone."""

    def sequences(*markers: Sequence[int]) -> list[common_pb2.TokenSequence]:
        return [common_pb2.TokenSequence(token_ids=marker) for marker in markers if marker]

    return common_pb2.ThinkingBudget(
        tokens=tokens,
        open=opened,
        starts=sequences(start),
        ends=sequences(end, *other_ends),
        close_ids=close or end,
    )


def token_logprobs(logprob: float, rank: int, *top: tuple[int, float]) -> common_pb2.TokenLogprobs:
    """Returns a token's log-probabilities; ``top`` are the likeliest tokens with theirs."""
    return common_pb2.TokenLogprobs(
        logprob=logprob,
        rank=rank,
        top_token_ids=[token for token, _ in top],
        top_logprobs=[value for _, value in top],
    )


def pooling_params(
    use_activation: bool | None = None,
    *,
    task: "common_pb2.PoolTask.ValueType" = common_pb2.POOL_TASK_EMBED,
    dimensions: int = 0,
    second_text_at: int = 0,
) -> common_pb2.PoolingParams:
    """Returns the parameters of a pooling request; None leaves the activation to the model."""
    return common_pb2.PoolingParams(
        task=task, use_activation=use_activation, dimensions=dimensions, second_text_at=second_text_at
    )
