r"""Regular expressions: what xgrammar 0.2.8 would ignore or get wrong is refused.

It matches whole texts, so an anchor is right at an edge of the expression and means nothing elsewhere. It drops lookahead with a warning.
In a JSON string it writes the characters of an expression as they are, unescaped: one that asks for a control character would make
broken JSON, and one that asks for a quote or a backslash would match nothing.
"""

import re
from collections.abc import Callable
from typing import Final

from protos.errors import InvalidArgument

MAX_PATTERN_NESTING: Final = 64
MAX_PATTERN_ALTERNATIVES: Final = 10_000

_LOOKAROUND: Final = ("(?=", "(?!", "(?<=", "(?<!")
# A control character, written out.
_CONTROL: Final = re.compile(r"\\(?:[tnrfv0]|x[01][0-9a-fA-F]|u00[01][0-9a-fA-F]|u\{0*1?[0-9a-fA-F]\}|c[A-Za-z])|[\x00-\x1f]")


def check_regex(pattern: str, param: str, *, in_json: bool = False) -> None:
    """Refuses what would not be enforced.

    Args:
        pattern: the expression.
        param: the parameter that an error names.
        in_json: whether its matches stand in a JSON string.

    Raises:
        InvalidArgument: naming what to change.
    """

    def refuse(what: str) -> InvalidArgument:
        shown = pattern if len(pattern) <= 60 else f"{pattern[:60]}…"
        return InvalidArgument(f"the pattern {shown!r} {what}", param=param)

    if not pattern:
        raise refuse("is empty; leave it out, or write what it should match")
    if "\0" in pattern:
        raise refuse("contains a NUL character")
    depth = alternatives = 0
    index, end = 0, len(pattern)
    alternation_at_top = False
    anchors: list[int] = []
    while index < end:
        char = pattern[index]
        if char == "\\":
            if in_json and (match := _CONTROL.match(pattern, index)):
                raise refuse(f"asks for the control character {match.group()!r}, which JSON strings do not hold")
            if in_json and pattern[index + 1 : index + 2] in ('"', "\\"):
                raise refuse("asks for a quote or a backslash, which stand escaped in JSON strings")
            index += 2
            continue
        if char == "[":
            index = _class_end(pattern, index, refuse, in_json=in_json)
            continue
        if char == "(":
            if pattern.startswith(_LOOKAROUND, index):
                raise refuse("looks ahead or behind, which cannot be enforced; write what the text may be instead")
            depth += 1
            if depth > MAX_PATTERN_NESTING:
                raise refuse(f"nests more than {MAX_PATTERN_NESTING} groups")
        elif char == ")":
            depth -= 1
        elif char == "|":
            alternatives += 1
            alternation_at_top |= depth == 0
        elif char in "^$":
            anchors.append(index)
        elif in_json and (char == '"' or char < " "):
            raise refuse("asks for a quote or a control character, which stand escaped in JSON strings")
        index += 1
    if alternatives > MAX_PATTERN_ALTERNATIVES:
        raise refuse(f"has {alternatives} alternatives; at most {MAX_PATTERN_ALTERNATIVES} are compiled")
    if any(not _is_edge(pattern, at, top=alternation_at_top) for at in anchors):
        raise refuse("has an anchor elsewhere than at its ends; put alternatives into a group: ^(a|b)$")


def _is_edge(pattern: str, at: int, *, top: bool) -> bool:
    """Whether an anchor stands at an end of the expression, or of an alternative at its top."""
    if pattern[at] == "^":
        return at == 0 or (top and pattern[at - 1] == "|")
    return at == len(pattern) - 1 or (top and pattern[at + 1] == "|")


def _class_end(pattern: str, start: int, refuse: Callable[[str], InvalidArgument], *, in_json: bool) -> int:
    """The index behind a character class that opens at ``start``."""
    index = start + 1
    negated = pattern.startswith("^", index)
    index += negated
    first = index
    while index < len(pattern) and (pattern[index] != "]" or index == first):
        if in_json and not negated and (match := _CONTROL.match(pattern, index)):
            raise refuse(f"asks for the control character {match.group()!r}, which JSON strings do not hold")
        index += 2 if pattern[index] == "\\" else 1
    return index + 1
