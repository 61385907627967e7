"""Limits of requests, for all three services.

The schema holds the bounds of message fields, as ``(bounds)`` options; this module reads them, so each
number is written once. Limits of no single field are constants here.
"""

from collections.abc import Mapping
from functools import cache
from typing import Final

from google.protobuf.descriptor import Descriptor

from protos.triptych.v1 import bounds_pb2, common_pb2, inference_pb2


@cache
def bounds_of(message: Descriptor) -> Mapping[str, bounds_pb2.Bounds]:
    """Returns the bounds of a message's fields, by field name; fields without bounds are absent."""
    options = {field.name: field.GetOptions() for field in message.fields}
    return {
        name: option.Extensions[bounds_pb2.bounds]
        for name, option in options.items()
        if option.HasExtension(bounds_pb2.bounds)
    }


SAMPLING: Final = bounds_of(common_pb2.SamplingParams.DESCRIPTOR)
"""Bounds of the sampling parameters, by name."""

_GENERATE: Final = bounds_of(inference_pb2.GenerateRequest.DESCRIPTOR)
_TOKEN_SEQUENCE: Final = bounds_of(common_pb2.TokenSequence.DESCRIPTOR)
_THINKING_BUDGET: Final = bounds_of(common_pb2.ThinkingBudget.DESCRIPTOR)

MAX_SEQUENCES: Final = int(_GENERATE["n"].max)
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

MAX_MARKERS: Final = _THINKING_BUDGET["ends"].max_items
"""Texts that start a thought, or end it, in a ``ThinkingBudget``."""

MAX_MARKER_TOKENS: Final = _THINKING_BUDGET["close_ids"].max_items
"""Tokens of each marker in a ``ThinkingBudget``."""

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

LONG_PROMPT: Final = 1 << 15
"""Tokens of a prompt beyond which work on all of them leaves the thread of the event loop."""

SLICE: Final = 1 << 15
"""Tokens that a single call converts while it keeps other threads waiting."""

MAX_RANKS: Final = 1024
"""Ranks of a replica."""
