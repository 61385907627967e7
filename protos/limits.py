"""Limits of requests, for all three services.

The schema holds the bounds of message fields, as ``(bounds)`` options; this module reads them, so each
number is written once. Limits of no single field are constants here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from protos.triptych.v1 import bounds_pb2, common_pb2, inference_pb2


@dataclass(frozen=True, slots=True)
class FieldBounds:
    """The ``(bounds)`` option of a field; ``bounds.proto`` explains each entry."""

    low: float | None = None
    high: float | None = None
    above_low: bool = False
    """Whether ``low`` itself is refused."""
    min_items: int = 0
    max_items: int = 0
    """0: no limit."""
    max_bytes: int = 0
    """0: no limit."""
    token_ids: bool = False
    sampled: bool = False
    off: tuple[float, ...] = ()


@cache
def bounds_of(message: Descriptor) -> Mapping[str, FieldBounds]:
    """Returns the bounds of a message's fields, by field name; fields without bounds are absent."""
    return {
        field.name: _read(field)
        for field in message.fields
        if field.GetOptions().HasExtension(bounds_pb2.bounds)
    }


def _read(field: FieldDescriptor) -> FieldBounds:
    option = field.GetOptions().Extensions[bounds_pb2.bounds]
    return FieldBounds(
        low=option.min if option.HasField("min") else None,
        high=option.max if option.HasField("max") else None,
        above_low=option.above_min,
        min_items=option.min_items,
        max_items=option.max_items,
        max_bytes=option.max_bytes,
        token_ids=option.token_ids,
        sampled=option.sampled,
        off=tuple(option.off),
    )


SAMPLING: Final = bounds_of(common_pb2.SamplingParams.DESCRIPTOR)
"""Bounds of the sampling parameters, by name."""

_GENERATE: Final = bounds_of(inference_pb2.GenerateRequest.DESCRIPTOR)
_TOKEN_SEQUENCE: Final = bounds_of(common_pb2.TokenSequence.DESCRIPTOR)

MAX_SEQUENCES: Final = int(_GENERATE["n"].high or 0)
"""Sequences of one request, as in OpenAI's API; each costs the scheduler as much as a request. vLLM allows
16384."""

MAX_REQUEST_ID_BYTES: Final = _GENERATE["request_id"].max_bytes

MAX_NAME_BYTES: Final = _GENERATE["cache_salt"].max_bytes
"""Bytes of a cache salt or a tenant's name, as UTF-8."""

MAX_LOGIT_BIASES: Final = SAMPLING["logit_bias"].max_items
MAX_STOP_TOKEN_IDS: Final = SAMPLING["stop_token_ids"].max_items
MAX_ALLOWED_TOKEN_IDS: Final = SAMPLING["allowed_token_ids"].max_items
"""More than the tokens of any vocabulary."""

MAX_BAD_WORDS: Final = SAMPLING["bad_words"].max_items
"""Token sequences; the gateway makes up to two of each word."""

MAX_BAD_WORD_TOKENS: Final = _TOKEN_SEQUENCE["token_ids"].max_items

MAX_LOGPROBS: Final = 20
"""Most likely tokens to report for each token; OpenAI's limit for chats."""

MAX_GRAMMAR_BYTES: Final = 256 * 1024
"""Size of a serialized ``StructuredOutput``. Bounds the work of compilers and the memory of waiting
requests."""

MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_LENGTH: Final = 1_000
"""Characters."""

MAX_BAD_WORD_LENGTH: Final = 200
"""Characters of an entry of ``bad_words`` in the HTTP API."""

MAX_CONCURRENT_RPCS: Final = 4096
"""Default of the services' ``--max-concurrent-rpcs``."""
