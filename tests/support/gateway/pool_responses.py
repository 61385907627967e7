"""Answers of a scripted scheduler to pooling requests."""

from collections.abc import Callable

from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference

_OF_TOKENS = (pb.POOL_TASK_TOKEN_EMBED, pb.POOL_TASK_TOKEN_CLASSIFY)

Values = Callable[[inference.PoolRequest], list[float]]


def pool_response(
    request: inference.PoolRequest, size: int, values_of: Values | None
) -> inference.PoolResponse:
    """Returns the answer to a request.

    Args:
        request: any.
        size: values of a result.
        values_of: gives the values; `None` for the number of tokens, the first token, then tenths.
    """
    prompt = request.prompt_token_ids
    values = values_of(request) if values_of else [len(prompt), prompt[0], *[0.1] * (size - 2)]
    of_tokens = request.task in _OF_TOKENS
    return inference.PoolResponse(
        request_id=request.request_id, values=values, num_prompt_tokens=len(prompt),
        shape=[len(prompt), len(values) // len(prompt)] if of_tokens else [len(values)],
    )  # fmt: skip


def pooling_info(info: pb.PoolingInfo, longest: int) -> pb.PoolingInfo:
    """Returns a copy with one shape for prompts of at most `longest` tokens."""
    described = pb.PoolingInfo()
    described.CopyFrom(info)
    described.shapes.add(kind=pb.GRAPH_KIND_POOL, batch=4, query_len=longest)
    return described
