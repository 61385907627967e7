"""Short quotations of a client's own input, for error messages."""

import json
from collections.abc import Iterator
from typing import Any, Final

# Longest piece of a client's input that an error quotes.
_MAX_QUOTE: Final = 60


def quote(value: Any) -> str:
    """Returns ``value`` as JSON, cut short. The effort does not grow with the value."""
    text = ""
    for piece in _json_pieces(value):
        text += piece
        if len(text) > _MAX_QUOTE:
            return f"{text[:_MAX_QUOTE]}…"
    return text


def _json_pieces(value: Any) -> Iterator[str]:
    # Every level yields something before it goes deeper: a reader that stops early also bounds the depth.
    if isinstance(value, str):
        yield json.dumps(value[:_MAX_QUOTE], ensure_ascii=False)
    elif isinstance(value, dict):
        yield "{"
        for count, (key, item) in enumerate(value.items()):
            yield ", " if count else ""
            yield from _json_pieces(key)
            yield ": "
            yield from _json_pieces(item)
        yield "}"
    elif isinstance(value, list):
        yield "["
        for count, item in enumerate(value):
            yield ", " if count else ""
            yield from _json_pieces(item)
        yield "]"
    else:
        yield json.dumps(value, default=str)


def clip(name: str) -> str:
    """Returns a name that a client made up, cut short."""
    return name if len(name) <= _MAX_QUOTE else f"{name[:_MAX_QUOTE]}…"


def omitted(kind: str, name: Any = None) -> str:
    """Returns the line that stands for a part of a conversation that no model here can read.

    Args:
        kind: the part's type, for example ``input_image``.
        name: its name, if it has one.
    """
    words = clip(kind).removeprefix("input_").replace("_", " ")
    return f"[{words} {quote(name)} omitted]" if isinstance(name, str) and name else f"[{words} omitted]"
