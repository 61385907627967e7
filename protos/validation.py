"""Validates requests on entry, by the same rules for gateways and direct gRPC clients.

All functions are pure. :func:`check_generate`, :func:`check_pool` and :func:`check_fields` need only the
message; :func:`check_token_ids` and :func:`check_ids` need the size of the model's vocabulary.
"""

import math
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any, Final, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from protos.errors import InvalidArgument
from protos.limits import MAX_GRAMMAR_BYTES, SAMPLING, bounds_of
from protos.triptych.v1 import bounds_pb2, common_pb2, inference_pb2

TOKEN_TASKS: Final = frozenset({common_pb2.POOL_TASK_TOKEN_EMBED, common_pb2.POOL_TASK_TOKEN_CLASSIFY})
"""The tasks whose results have a vector for each token."""

EMPTY_CONSTRAINT: Final = (
    "structured_output is empty; set json_schema, json_object, regex, grammar, choice or structural_tag"
)


def check_generate(request: inference_pb2.GenerateRequest) -> None:
    """Checks a request without knowing the model.

    Raises:
        InvalidArgument: naming the field, its bounds and the sent value.
    """
    check_fields(request)
    if request.sampling.HasField("structured_output"):
        _check_constraint(request.sampling.structured_output)
    _check_resumed(request)


def check_pool(request: inference_pb2.PoolRequest) -> None:
    """Checks a pooling request without knowing the model.

    Raises:
        InvalidArgument: naming the field, its bounds and the sent value.
    """
    check_fields(request)
    if request.task and request.task not in common_pb2.PoolTask.values():
        raise InvalidArgument(f"task {request.task} is not known; send POOL_TASK_EMBED", param="task")
    if request.second_text_at >= len(request.prompt_token_ids):
        raise InvalidArgument(
            f"second_text_at is {request.second_text_at}, but the prompt has {len(request.prompt_token_ids)} tokens;"
            " send the index of one of them, or 0 for one text",
            param="second_text_at",
        )


def check_fields(message: Message, *, entries: bool = True) -> None:
    """Checks a message of ``triptych.v1`` and its submessages against the bounds in the schema.

    Without `entries`, only the number of messages in repeated fields is checked.

    Raises:
        InvalidArgument: naming the field, its bounds and the sent value.
    """
    for found in _walk(message, entries=entries):
        _check_value(found)


def check_token_ids(message: Message, vocab_size: int) -> None:
    """Checks that every token id in a message and its submessages is below the size of the vocabulary."""
    for found in _walk(message):
        if found.bounds.token_ids:
            check_ids(found.name, found.value, vocab_size)


def check_ids(param: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Checks that token ids are in the model's vocabulary; the refusal names the largest."""
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise InvalidArgument(
            f"'{param}' has the token id {largest}; this model's ids end at {vocab_size - 1}", param=param
        )


def count_values(
    request: inference_pb2.PoolRequest | common_pb2.PoolingParams, num_tokens: int, vector_size: int
) -> int:
    """Returns the number of values in the result of a pooling request with a prompt of `num_tokens`."""
    size = request.dimensions or vector_size
    return size * num_tokens if request.task in TOKEN_TASKS else size


def requested_features(sampling: common_pb2.SamplingParams) -> frozenset[str]:
    """Returns the names of the parameters that a worker must support to serve the request."""
    return frozenset(
        field.name
        for field, value in sampling.ListFields()
        if (bounds := SAMPLING.get(field.name)) is not None and bounds.sampled and value not in bounds.off
    )


class _Found(NamedTuple):
    """A field with bounds, and its value in a message."""

    name: str
    """Name to report: for entries of a repeated field, the name of that field."""
    field: FieldDescriptor
    bounds: bounds_pb2.Bounds
    value: Any
    nested: bool
    """Whether the message is an entry of a repeated field."""


def _walk(message: Message, entry_of: str = "", *, entries: bool = True) -> Iterator[_Found]:
    """Yields the bounded fields of a message and its submessages, a field before its entries, if wanted.

    Fields that can be absent, and are, count as unbounded.
    """
    for field, bounds in _fields(message.DESCRIPTOR):
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        if bounds is not None:
            yield _Found(entry_of or field.name, field, bounds, value, nested=bool(entry_of))
        if field.message_type is None or _is_map(field):
            continue
        if not field.is_repeated:
            yield from _walk(value, entries=entries)
            continue
        for entry in value if entries else ():
            yield from _walk(entry, entry_of or field.name)


@cache
def _fields(message: Descriptor) -> tuple[tuple[FieldDescriptor, bounds_pb2.Bounds | None], ...]:
    bounds = bounds_of(message)
    return tuple(
        (field, bounds.get(field.name))
        for field in message.fields
        if field.name in bounds or (field.message_type is not None and not _is_map(field))
    )


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _check_value(found: _Found) -> None:
    name, field, bounds, value, nested = found
    if not field.is_repeated:
        if bounds.max_bytes and len(value.encode()) > bounds.max_bytes:
            raise InvalidArgument(f"{name} is longer than {bounds.max_bytes} bytes", param=name)
        if field.message_type is None and not isinstance(value, str):
            _check_number(name, bounds, value)
        return
    count = len(value)
    too_many = bounds.max_items and count > bounds.max_items
    if nested and (too_many or count < bounds.min_items):
        raise InvalidArgument(
            f"each of {name} must have {bounds.min_items} to {bounds.max_items} tokens", param=name
        )
    if too_many:
        raise InvalidArgument(f"{name} takes at most {bounds.max_items} entries, got {count}", param=name)
    if count < bounds.min_items:
        unit = "token" if bounds.token_ids else "entry"
        raise InvalidArgument(f"{name} is empty; send at least one {unit}", param=name)
    if _is_map(field):
        for number in value.values():
            _check_number(name, bounds, number)


def _check_number(name: str, bounds: bounds_pb2.Bounds, value: float) -> None:
    low = bounds.min if bounds.HasField("min") else None
    high = bounds.max if bounds.HasField("max") else None
    too_low = low is not None and (value < low or (bounds.above_min and value == low))
    if not (too_low or (high is not None and value > high) or math.isnan(value)):
        return
    floor = "" if low is None else f"above {low:g}" if bounds.above_min else f"at least {low:g}"
    ceiling = "" if high is None else f"at most {high:g}"
    if low is not None and high is not None and not bounds.above_min:
        allowed = f"between {low:g} and {high:g}"
    else:
        allowed = " and ".join(filter(None, (floor, ceiling)))
    raise InvalidArgument(f"{name} must be {allowed or 'a number'}, not {_text(value)}", param=name)


def _text(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _check_constraint(constraint: common_pb2.StructuredOutput) -> None:
    kind = constraint.WhichOneof("spec")
    if kind is None or (kind == "json_object" and not constraint.json_object):
        raise InvalidArgument(EMPTY_CONSTRAINT, param="structured_output")
    if constraint.ByteSize() > MAX_GRAMMAR_BYTES:
        raise InvalidArgument(
            f"{kind} has {constraint.ByteSize()} bytes; at most {MAX_GRAMMAR_BYTES} are allowed",
            param="structured_output",
        )


def _check_resumed(request: inference_pb2.GenerateRequest) -> None:
    resumed = request.resumed
    if not resumed:
        return
    n = request.n if request.HasField("n") else 1
    sequences = {part.sequence for part in resumed}
    if len(sequences) < len(resumed) or max(sequences) >= n:
        raise InvalidArgument(f"resumed must name each sequence below n={n} at most once", param="resumed")
    if sum(part.finished for part in resumed) == n:
        raise InvalidArgument("all sequences have finished; nothing is left to run", param="resumed")
