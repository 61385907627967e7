"""Streams that a client can continue on any gateway: the ids of their events.

An id is ``ANSWER:COUNTS``: how many chunks of each choice the client has when it has this one, for example
``chatcmpl-1f0c…:12-9``. Choices are counted apart because their order differs from run to run. The last chunk
of a stream with usage has ``end`` instead of counts.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import orjson
from starlette.datastructures import Headers

from protos.errors import InvalidArgument

LAST_EVENT_ID: Final = "last-event-id"

MAX_CHOICES: Final = 16
"""Most choices of a resumable stream: each chunk's id counts all of them."""

_END: Final = "end"
_MAX_CHUNKS: Final = 2**31
_EVENT_ID: Final = re.compile(r"([a-z]+-[0-9a-f]{32}):(end|\d{1,10}(?:-\d{1,10}){0,15})")


class Position(NamedTuple):
    """What a client has of a stream."""

    answer_id: str
    seen: tuple[int, ...] | None
    """Chunks of each choice; ``None``: all there are."""


def position_of(headers: Headers, id_prefix: str, num_choices: int) -> Position | None:
    """Returns what the client has of the stream that it continues; ``None`` if it begins one.

    Args:
        headers: the HTTP request's.
        id_prefix: how the endpoint's answer ids begin.
        num_choices: choices that the request asks for.

    Raises:
        InvalidArgument: if the header is not an id of such a stream.
    """
    text = headers.get(LAST_EVENT_ID)
    if text is None:
        return None
    match = _EVENT_ID.fullmatch(text)
    if match is not None and match[1].startswith(id_prefix):
        if match[2] == _END:
            return Position(match[1], None)
        seen = tuple(map(int, match[2].split("-")))
        if len(seen) == num_choices and max(seen) < _MAX_CHUNKS:
            return Position(match[1], seen)
    raise InvalidArgument(
        "Last-Event-ID is not the id of a chunk that this request's stream has; send the last 'id' that was received,"
        " or no such header",
        param="Last-Event-ID",
    )


def digest_of(path: str, tenant: str, body: bytes) -> str:
    """Returns a digest that is equal for requests with the same answer: 64 hexadecimal digits.

    The body's white space and the order of its fields do not count. Takes time in proportion to the body.
    """
    fields = orjson.dumps([path, tenant, orjson.loads(body)], option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(fields, digest_size=32).hexdigest()


class ChunkNumbers:
    """Puts ids on the chunks of one stream, and leaves out those that its client has."""

    def __init__(self, answer_id: str, seen: Sequence[int]) -> None:
        """Starts at the stream's beginning, with ``seen`` chunks of each choice to leave out."""
        self._head = b"id: " + answer_id.encode() + b":"
        self._seen = tuple(seen)
        self._at = list(seen)
        self._written = [0] * len(seen)

    def number(self, choice: int, chunks: bytes) -> bytes:
        """Returns the new ones among the next chunks of a choice, with their ids."""
        out: list[bytes] = []
        # JSON has no line breaks, so an empty line ends a chunk.
        for chunk in chunks.split(b"\n\n")[:-1]:
            self._written[choice] += 1
            if self._written[choice] > self._seen[choice]:
                self._at[choice] = self._written[choice]
                counts = "-".join(map(str, self._at)).encode()
                out += (self._head, counts, b"\n", chunk, b"\n\n")
        return b"".join(out)

    def last(self, chunk: bytes) -> bytes:
        """Returns the chunk that ends the stream, with its id; nothing if there is none."""
        return self._head + _END.encode() + b"\n" + chunk if chunk else b""
