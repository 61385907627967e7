"""Special tokens in grammars: those whose texts, or which by themselves, a structural tag has in it.

A special token has no text in a grammar's vocabulary, so it is never allowed: it is no part of what clients read. But a model that was trained
to begin its calls with the token [TOOL_CALLS] should not have to spell it in letters because a tag says so. For such a tag the vocabulary is
made once more, with texts for the special tokens that occur in it.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

# What of a structural tag is written as it stands. Schemas, expressions and grammars describe what the model says.
_WRITTEN: Final = frozenset({"begin", "end", "triggers", "separator", "value", "rules"})
_TOKENS: Final = frozenset({"token", "trigger_tokens"})
_NO_TOKENS: Final = "exclude_tokens"
_DESCRIBED: Final = frozenset({"json_schema", "pattern", "grammar", "excludes"})


def markers_in(tag: Any, specials: Mapping[str, int]) -> dict[str, int]:
    """The special tokens that a structural tag names, or whose texts it writes.

    Args:
        tag: lowered.
        specials: ids of special tokens by their text.
    """
    written = list(_found(tag, _WRITTEN))
    named = set(_found(tag, _TOKENS)) | set(_found(tag, frozenset({"rules"})))
    return {
        text: token_id
        for text, token_id in specials.items()
        if text in named
        or token_id in named
        or any(isinstance(each, str) and text in each for each in written)
    }


def numbered(tag: Any, id_of: Callable[[str], int]) -> Any:
    """The same tag with ids for tokens that it names by their text.

    Raises:
        InvalidArgument: raised by ``id_of``, if there is no such token.
    """
    if isinstance(tag, list):
        return [numbered(each, id_of) for each in tag]
    if not isinstance(tag, dict):
        return tag

    def token(value: Any) -> Any:
        return id_of(value) if isinstance(value, str) else value

    changed = {}
    for name, value in tag.items():
        if name in _DESCRIBED:
            changed[name] = value
        elif name in _TOKENS or name == _NO_TOKENS:
            changed[name] = [token(each) for each in value] if isinstance(value, list) else token(value)
        elif name == "rules" and tag.get("type") == "token_dispatch" and isinstance(value, list):
            changed[name] = [
                [token(rule[0]), *numbered(rule[1:], id_of)] if isinstance(rule, list) and rule else rule
                for rule in value
            ]
        else:
            changed[name] = numbered(value, id_of)
    return changed


def with_markers(words: Iterable[bytes], markers: Mapping[str, int]) -> list[bytes]:
    """A vocabulary, decoded, in which some special tokens have their text."""
    known = list(words)
    for text, token_id in markers.items():
        known[token_id] = text.encode()
    return known


def described(tokenizer: str, specials: Mapping[str, int]) -> bytes:
    """A vocabulary for another process: xgrammar's own form, and the special tokens that it leaves out."""
    return json.dumps({"tokenizer": tokenizer, "specials": specials}).encode()


def read_description(payload: bytes) -> tuple[str, dict[str, int]]:
    """What :func:`described` was given."""
    content = json.loads(payload)
    return content["tokenizer"], content["specials"]


def _found(node: Any, names: frozenset[str], *, here: bool = False) -> Iterator[str | int]:
    """Texts and numbers under some names, whatever lists they stand in."""
    if isinstance(node, list):
        for each in node:
            yield from _found(each, names, here=here)
    elif isinstance(node, dict):
        for name, value in node.items():
            if name not in _DESCRIBED:
                yield from _found(value, names, here=name in names)
    elif here and isinstance(node, str | int):
        yield node
