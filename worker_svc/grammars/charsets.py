"""Sets of characters as sorted ranges of code points."""

import unicodedata
from collections.abc import Iterable
from functools import cache
from typing import Final, TypeAlias

Charset: TypeAlias = tuple[tuple[int, int], ...]
"""First and last code point of each range, ascending; no two ranges touch."""

_LAST: Final = 0x10FFFF
_SURROGATES: Final = (0xD800, 0xDFFF)


def union(ranges: Iterable[tuple[int, int]]) -> Charset:
    """Returns the characters of all `ranges`, which may overlap."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], last)
        else:
            merged.append((first, last))
    return tuple(merged)


def complement(chars: Iterable[tuple[int, int]]) -> Charset:
    """Returns all characters outside `chars`; surrogates are never included."""
    gaps, start = [], 0
    for first, last in union([*chars, _SURROGATES]):
        if first > start:
            gaps.append((start, first - 1))
        start = last + 1
    return (*gaps, (start, _LAST)) if start <= _LAST else tuple(gaps)


def difference(chars: Charset, removed: Charset) -> Charset:
    """Returns the characters of `chars` outside `removed`."""
    return complement(union([*complement(chars), *removed]))


def intersection(chars: Charset, others: Charset) -> Charset:
    """Returns the characters in both sets."""
    return complement(union([*complement(chars), *complement(others)]))


ALL: Final = complement(())
"""Every character."""
NEWLINES: Final = union([(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)])
_SPACES: Final = union([
    (9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
])  # fmt: skip
_DIGITS: Final = union([(0x30, 0x39)])
_WORD: Final = union([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
ESCAPE_CLASSES: Final[dict[str, Charset]] = {
    "d": _DIGITS, "D": complement(_DIGITS), "w": _WORD, "W": complement(_WORD), "s": _SPACES,
    "S": complement(_SPACES),
}  # fmt: skip
"""Sets of class escapes such as `\\d`, by letter, as in ECMAScript."""
NAMED_ESCAPES: Final = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
"""Control characters by the letter of their escape."""


_CATEGORIES: Final = {
    "letter": "L", "uppercase_letter": "Lu", "lowercase_letter": "Ll", "mark": "M", "number": "N", "digit": "Nd",
    "decimal_number": "Nd", "punctuation": "P", "symbol": "S", "separator": "Z", "space_separator": "Zs",
}  # fmt: skip


@cache
def category(name: str) -> Charset:
    """Returns the characters of a Unicode general category such as `Lu` or `Letter`; empty if unknown."""
    prefix = _CATEGORIES.get(name.lower(), name)
    if len(prefix) > 2:
        return ()
    points = (point for point in range(_LAST + 1) if unicodedata.category(chr(point)).startswith(prefix))
    return intersection(union((point, point) for point in points), ALL)


def class_text(chars: Charset) -> str:
    """Returns an expression for a character of `chars`, in printable ASCII without a slash."""
    if len(chars) == 1 and chars[0][0] == chars[0][1]:
        return _point_text(chars[0][0])
    return "[" + "".join(
        _point_text(first) + (f"-{_point_text(last)}" if last > first else "") for first, last in chars
    ) + "]"  # fmt: skip


def _point_text(point: int) -> str:
    return chr(point) if point < 0x80 and chr(point).isalnum() else f"\\x{{{point:x}}}"
