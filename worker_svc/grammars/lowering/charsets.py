"""Sets of characters as sorted ranges of code points, and the regular expression classes that denote them."""

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Final, TypeAlias

Charset: TypeAlias = tuple[tuple[int, int], ...]
"""First and last code point of each range, ascending; no two ranges touch."""

_LAST: Final = 0x10FFFF
_SURROGATES: Final = (0xD800, 0xDFFF)
_ELEMENT: Final = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|c[A-Za-z]|.)|.", re.DOTALL
)
_NAMED: Final = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "a": 7, "e": 27, "b": 8, "0": 0}


def union(ranges: Iterable[tuple[int, int]]) -> Charset:
    """Returns the characters of all `ranges`, which may overlap."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], last)
        else:
            merged.append((first, last))
    return tuple(merged)


def complement(chars: Charset) -> Charset:
    """Returns all characters outside `chars`; surrogates are never included."""
    gaps, start = [], 0
    for first, last in union([*chars, _SURROGATES]):
        if first > start:
            gaps.append((start, first - 1))
        start = last + 1
    return (*gaps, (start, _LAST)) if start <= _LAST else tuple(gaps)


def difference(chars: Charset, removed: Charset) -> Charset:
    """Returns the characters of `chars` that are not in `removed`."""
    return complement(union([*complement(chars), *removed]))


JSON_UNSAFE: Final = union([(0, 0x1F), (ord('"'),) * 2, (ord("\\"),) * 2])
"""Characters that a JSON string must escape."""

NEWLINES: Final = union([(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)])
_SPACES: Final = union([(9, 13), (0x20, 0x20), (0xA0, 0xA0)])
# Regex engines disagree whether these are white space, so neither \s nor \S matches them.
_AMBIGUOUS_SPACES: Final = union([
    (0x1C, 0x1F), (0x85, 0x85), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
])  # fmt: skip
_DIGITS: Final = union([(0x30, 0x39)])
_WORD: Final = union([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
ESCAPE_CLASSES: Final[dict[str, Charset]] = {
    "d": _DIGITS, "D": complement(_DIGITS), "w": _WORD, "W": complement(_WORD), "s": _SPACES,
    "S": complement(union([*_SPACES, *_AMBIGUOUS_SPACES])),
}  # fmt: skip
"""Sets of class escapes such as `\\d`, by letter:

ASCII as in ECMAScript; `\\D` and `\\W` are the complements.
"""


def code_point(escape: str) -> int:
    r"""Returns the character that an escape such as `\x41`, `\n` or `\.` denotes."""
    kind, rest = escape[1], escape[2:]
    if kind in "xu" and rest:
        return int(rest.strip("{}"), 16)
    if kind == "c" and rest:
        return ord(rest.upper()) - 64
    return _NAMED.get(kind, ord(kind))


def split_class(inside: str) -> list[str]:
    """Splits the text between the brackets of a class into characters and escapes."""
    return [match.group() for match in _ELEMENT.finditer(inside)]


def parse_class(elements: list[str], *, negated: bool) -> tuple[Charset, tuple[int, ...]]:
    """Parses a character class.

    Args:
        elements: the content of its brackets without a leading `^`, from `split_class`.
        negated: whether it starts with `^`.

    Returns:
        The characters that it matches, and the characters written in it, range ends included.

    Raises:
        ValueError: describes the malformed range.
    """
    ranges: list[tuple[int, int]] = []
    literals: list[int] = []
    at = 0
    while at < len(elements):
        element = elements[at]
        at += 1
        if element[0] == "\\" and element[1] in ESCAPE_CLASSES:
            # [^\s] must equal \S, which also excludes the ambiguous spaces.
            ranges += (
                complement(ESCAPE_CLASSES[element[1].swapcase()]) if negated else ESCAPE_CLASSES[element[1]]
            )
            continue
        first = last = _single(element)
        if at + 1 < len(elements) and elements[at] == "-":
            end = elements[at + 1]
            if end[0] == "\\" and end[1] in ESCAPE_CLASSES:
                raise ValueError(f"has a range that ends in {end}")
            last = _single(end)
            at += 2
        if last < first:
            raise ValueError("has a range that ends before it begins")
        ranges.append((first, last))
        literals += {first, last}
    return complement(union(ranges)) if negated else union(ranges), tuple(literals)


def _single(element: str) -> int:
    return code_point(element) if element[0] == "\\" else ord(element)


# Ranges are split here, so that each piece falls into one part of the printed class (see _order).
_SPLITS: Final = (0x20, ord("-"), ord("-") + 1, ord("^"), ord("^") + 1, 0x7F)


def class_pattern(chars: Charset) -> str:
    """Returns an expression that matches one character of `chars`, in printable ASCII.

    xgrammar parses it twice: as an expression, then as a character class of a grammar. That second
    parser reads a hyphen at the edge of a range as another range, a leading caret as negation, and letters
    after a hexadecimal escape as more digits. So hyphen and caret stand alone, the caret last, and escapes
    follow the letters.
    """
    pieces = []
    for first, last in chars:
        edges = [first, *(split for split in _SPLITS if first < split <= last), last + 1]
        pieces += [(start, end - 1) for start, end in pairwise(edges)]
    if pieces == [(ord("^"), ord("^"))]:
        return r"\^"
    pieces.sort(key=lambda piece: (_order(piece[0]), piece))
    return "[" + "".join(_range_text(*piece) for piece in pieces) + "]"


def _order(first: int) -> int:
    """Returns the sort key within a class: printable ASCII, control characters, non-ASCII, caret."""
    return 3 if first == ord("^") else 2 if first >= 0x7F else 1 if first < 0x20 else 0


def _range_text(first: int, last: int) -> str:
    return _escaped(first) + (f"-{_escaped(last)}" if last > first else "")


def _escaped(point: int) -> str:
    char = chr(point)
    if 0x20 <= point < 0x7F:
        return f"\\{char}" if char in "-^]\\[" else char
    return f"\\x{point:02x}" if point < 0x80 else f"\\u{{{point:x}}}"
