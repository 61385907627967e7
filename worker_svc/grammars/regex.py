r"""Regular expressions: what xgrammar 0.2.8 would ignore or get wrong is refused.

It matches whole texts, so an anchor is right at an edge of the expression and means nothing elsewhere. It drops lookahead with a warning.
In a JSON string it writes the characters of an expression as they are, unescaped: one that asks for a control character would make
broken JSON, and one that asks for a quote or a backslash would match nothing.
"""

import re
from collections import Counter
from typing import Final

from protos.errors import InvalidArgument

MAX_NESTING: Final = 64
MAX_ALTERNATIVES: Final = 10_000

# What is never closed goes on to the end: every character is read once, whatever the text.
_PIECES: Final = re.compile(
    r"""(?P<escape>\\.)
      | (?P<class>\[(?P<negated>\^?)\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z))
      | (?P<look>\(\?<?[=!])
      | (?P<open>\()
      | (?P<close>\))
      | (?P<or>\|)
      | (?P<anchor>[\^$])""",
    re.VERBOSE | re.DOTALL,
)
# A control character, written out.
_CONTROL: Final = re.compile(
    r"\\(?:[tnrfv0]|x[01][0-9a-fA-F]|u00[01][0-9a-fA-F]|u\{0*1?[0-9a-fA-F]\}|c[A-Za-z])|[\x00-\x1f]"
)


def check_regex(pattern: str, param: str, *, in_json: bool = False) -> None:
    """Refuses what would not be enforced.

    Args:
        pattern: the expression.
        param: the parameter that an error names.
        in_json: whether its matches stand in a JSON string.

    Raises:
        InvalidArgument: naming what to change.
    """
    why = _objection(pattern) or (_objection_in_json(pattern) if in_json else "")
    if why:
        shown = pattern if len(pattern) <= 60 else f"{pattern[:60]}…"
        raise InvalidArgument(f"the pattern {shown!r} {why}", param=param)


def _objection(pattern: str) -> str:
    if not pattern:
        return "is empty; leave it out, or write what it should match"
    if "\0" in pattern:
        return "contains a NUL character"
    depth = deepest = 0
    splits: list[int] = [-1]
    anchors: list[int] = []
    count: Counter[str] = Counter()
    for piece in _PIECES.finditer(pattern):
        kind = piece.lastgroup or ""
        count[kind] += 1
        depth += (kind == "open") - (kind == "close")
        deepest = max(deepest, depth)
        if kind == "or" and depth == 0:
            splits.append(piece.start())
        elif kind == "anchor":
            anchors.append(piece.start())
    splits.append(len(pattern))
    if count["look"]:
        return "looks ahead or behind, which cannot be enforced; write what the text may be instead"
    if deepest > MAX_NESTING:
        return f"nests {deepest} groups; at most {MAX_NESTING} are compiled"
    if count["or"] > MAX_ALTERNATIVES:
        return f"has {count['or']} alternatives; at most {MAX_ALTERNATIVES} are compiled"
    if any((at - 1 if pattern[at] == "^" else at + 1) not in splits for at in anchors):
        return "has an anchor elsewhere than at its ends; put alternatives into a group: ^(a|b)$"
    return ""


def _objection_in_json(pattern: str) -> str:
    control = "asks for a control character, which does not stand in a JSON string as it is"
    outside = list(pattern)
    for piece in _PIECES.finditer(pattern):
        if piece["class"] is None and piece["escape"] is None:
            continue
        outside[piece.start() : piece.end()] = " " * (piece.end() - piece.start())
        if piece["escape"] in ('\\"', "\\\\"):
            return "asks for a quote or a backslash, which do not stand in a JSON string as they are"
        if piece["class"] and not piece["negated"] and _CONTROL.search(piece["class"]):
            return control
        if piece["escape"] and _CONTROL.match(pattern, piece.start()):
            return control
    left = "".join(outside)
    if '"' in left:
        return "asks for a quote, which does not stand in a JSON string as it is"
    return control if _CONTROL.search(left) else ""
