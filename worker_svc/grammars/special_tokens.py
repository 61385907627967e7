"""Special tokens written or named by a structural tag.

A grammar's vocabulary gives special tokens no text, so grammars never allow them: clients do not read them.
But a model trained to start its calls with the token [TOOL_CALLS] should not have to spell it letter by
letter because a tag contains that text. For such a tag, the vocabulary is rebuilt with texts for the special
tokens that occur in the tag. These tokens are its markers.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

# Fields of a structural tag that are output literally.
_LITERAL: Final = frozenset({"begin", "end", "triggers", "separator", "value", "rules"})
# Fields that name tokens, by text or id.
_TOKENS: Final = frozenset({"token", "trigger_tokens"})
_EXCLUDED_TOKENS: Final = "exclude_tokens"
# Fields that describe output instead of containing it.
_DESCRIPTIONS: Final = frozenset({"json_schema", "pattern", "grammar", "excludes"})


def markers_in(tag: Any, specials: Mapping[str, int]) -> dict[str, int]:
    """Returns the special tokens, by text, that a structural tag names or writes out.

    Args:
        tag: the lowered tag.
        specials: ids of special tokens by their text.
    """
    literals = list(_find(tag, _LITERAL))
    named = set(_find(tag, _TOKENS)) | set(_find(tag, frozenset({"rules"})))
    return {
        text: token_id
        for text, token_id in specials.items()
        if text in named
        or token_id in named
        or any(isinstance(literal, str) and text in literal for literal in literals)
    }


def resolve_token_names(tag: Any, id_of: Callable[[str], int]) -> Any:
    """Returns the tag with ids in place of the tokens that it names by text.

    Raises:
        InvalidArgument: from `id_of`, if no such token exists.
    """
    if isinstance(tag, list):
        return [resolve_token_names(each, id_of) for each in tag]
    if not isinstance(tag, dict):
        return tag

    def token(value: Any) -> Any:
        return id_of(value) if isinstance(value, str) else value

    changed = {}
    for name, value in tag.items():
        if name in _DESCRIPTIONS:
            changed[name] = value
        elif name in _TOKENS or name == _EXCLUDED_TOKENS:
            changed[name] = [token(each) for each in value] if isinstance(value, list) else token(value)
        elif name == "rules" and tag.get("type") == "token_dispatch" and isinstance(value, list):
            changed[name] = [
                [token(rule[0]), *resolve_token_names(rule[1:], id_of)]
                if isinstance(rule, list) and rule
                else rule
                for rule in value
            ]
        else:
            changed[name] = resolve_token_names(value, id_of)
    return changed


def with_marker_texts(vocabulary: Iterable[bytes], markers: Mapping[str, int]) -> list[bytes]:
    """Returns the decoded vocabulary with the markers' texts filled in."""
    texts = list(vocabulary)
    for text, token_id in markers.items():
        texts[token_id] = text.encode()
    return texts


def _find(node: Any, names: frozenset[str], *, inside: bool = False) -> Iterator[str | int]:
    """Yields strings and numbers in the fields called `names`, at any depth of lists."""
    if isinstance(node, list):
        for each in node:
            yield from _find(each, names, inside=inside)
    elif isinstance(node, dict):
        for name, value in node.items():
            if name not in _DESCRIPTIONS:
                yield from _find(value, names, inside=name in names)
    elif inside and isinstance(node, str | int):
        yield node
