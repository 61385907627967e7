"""Sets of characters, as sorted ranges of code points."""

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Final, TypeAlias

Charset: TypeAlias = tuple[tuple[int, int], ...]
"""First and last of each range; ascending, apart."""

_LAST: Final = 0x10FFFF
_SURROGATES: Final = (0xD800, 0xDFFF)
_ELEMENT: Final = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|c[A-Za-z]|.)|.", re.DOTALL
)
_NAMED: Final = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "a": 7, "e": 27, "b": 8, "0": 0}


def union(ranges: Iterable[tuple[int, int]]) -> Charset:
    """All characters of some ranges."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], last)
        else:
            merged.append((first, last))
    return tuple(merged)


def complement(of: Charset) -> Charset:
    """All other characters."""
    left, start = [], 0
    for first, last in union([*of, _SURROGATES]):
        if first > start:
            left.append((start, first - 1))
        start = last + 1
    return (*left, (start, _LAST)) if start <= _LAST else tuple(left)


def minus(one: Charset, other: Charset) -> Charset:
    """What is in ``one`` and not in ``other``."""
    return complement(union([*complement(one), *other]))


UNSAFE: Final = union([(0, 0x1F), (ord('"'),) * 2, (ord("\\"),) * 2])
"""What JSON has to escape."""
NEWLINES: Final = union([(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)])
_SPACES: Final = union([(9, 13), (0x20, 0x20), (0xA0, 0xA0)])
# What some readers count among \s and others do not: in neither \s nor \S.
_DOUBTFUL_SPACES: Final = union([
    (0x1C, 0x1F), (0x85, 0x85), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
])  # fmt: skip
_DIGITS: Final = union([(0x30, 0x39)])
_WORD: Final = union([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
CLASSES: Final[dict[str, Charset]] = {
    "d": _DIGITS, "D": complement(_DIGITS), "w": _WORD, "W": complement(_WORD), "s": _SPACES,
    "S": complement(union([*_SPACES, *_DOUBTFUL_SPACES])),
}  # fmt: skip
"""What an escape such as ``\\d`` stands for, by its letter: in ASCII, as in ECMAScript, and ``\\D`` and ``\\W`` for all else."""


def code_point(escape: str) -> int:
    r"""The character that an escape such as ``\x41``, ``\n`` or ``\.`` stands for."""
    kind, rest = escape[1], escape[2:]
    if kind in "xu" and rest:
        return int(rest.strip("{}"), 16)
    if kind == "c" and rest:
        return ord(rest.upper()) - 64
    return _NAMED.get(kind, ord(kind))


def elements_of(inside: str) -> list[str]:
    """What stands between the brackets of a class, cut into characters and escapes."""
    return [match.group() for match in _ELEMENT.finditer(inside)]


def read_class(elements: list[str], *, negated: bool) -> tuple[Charset, tuple[int, ...]]:
    """What a class stands for.

    Args:
        elements: what stands between its brackets, its ``^`` left out.
        negated: whether it has one.

    Returns:
        The characters, and those that were written out, ends of ranges among them.

    Raises:
        ValueError: saying what is wrong with it.
    """
    ranges: list[tuple[int, int]] = []
    written: list[int] = []
    at = 0
    while at < len(elements):
        element = elements[at]
        at += 1
        if element[0] == "\\" and element[1] in CLASSES:
            # Negated, what readers disagree on goes as well: [^\s] is \S.
            ranges += complement(CLASSES[element[1].swapcase()]) if negated else CLASSES[element[1]]
            continue
        first = last = _single(element)
        if at + 1 < len(elements) and elements[at] == "-":
            end = elements[at + 1]
            if end[0] == "\\" and end[1] in CLASSES:
                raise ValueError(f"has a range that ends in {end}")
            last = _single(end)
            at += 2
        if last < first:
            raise ValueError("has a range that ends before it begins")
        ranges.append((first, last))
        written += {first, last}
    return complement(union(ranges)) if negated else union(ranges), tuple(written)


def _single(element: str) -> int:
    return code_point(element) if element[0] == "\\" else ord(element)


# Where ranges are cut, so that each piece is in one part of a class: printable ASCII, control characters, all others.
_CUTS: Final = (0x20, ord("-"), ord("-") + 1, ord("^"), ord("^") + 1, 0x7F)


def written_out(chars: Charset) -> str:
    """An expression for one of some characters, in printable ASCII, as xgrammar reads it twice.

    It makes a grammar's class of it. There a hyphen at the edge of a range means another range, a caret in front negates, and letters behind a
    character in hexadecimal digits are counted to these. So hyphen and caret stand alone, the latter last, and what is written in digits stands
    behind the letters.
    """
    pieces = []
    for first, last in chars:
        edges = [first, *(cut for cut in _CUTS if first < cut <= last), last + 1]
        pieces += [(start, end - 1) for start, end in pairwise(edges)]
    if pieces == [(ord("^"), ord("^"))]:
        return r"\^"
    pieces.sort(key=lambda piece: (_place(piece[0]), piece))
    return "[" + "".join(_written(*piece) for piece in pieces) + "]"


def _place(first: int) -> int:
    return 3 if first == ord("^") else 2 if first >= 0x7F else 1 if first < 0x20 else 0


def _written(first: int, last: int) -> str:
    return _escaped(first) + (f"-{_escaped(last)}" if last > first else "")


def _escaped(point: int) -> str:
    char = chr(point)
    if 0x20 <= point < 0x7F:
        return f"\\{char}" if char in "-^]\\[" else char
    return f"\\x{point:02x}" if point < 0x80 else f"\\u{{{point:x}}}"
