r"""Regular languages: JSON Schema's expressions as trees, and trees as terminals of an llguidance grammar.

Expressions follow ECMAScript: `\d` and `\w` are ASCII, `.` stops at line ends, and lookahead is supported. A
terminal may hold intersections and complements, which llguidance matches natively.
"""

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Final, NoReturn, TypeAlias

from llguidance import LLMatcher, LLTokenizer

from worker_svc.grammars.limits import MAX_ALTERNATIVES, MAX_EXPANDED, MAX_NESTING

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


@dataclass(frozen=True)
class Chars:
    """A character of a set."""

    chars: Charset


@dataclass(frozen=True)
class Sequence:
    """Expressions in a row; none: the empty text."""

    parts: "tuple[Rx, ...]"


@dataclass(frozen=True)
class AnyOf:
    """Texts matching any expression; none: no text."""

    parts: "tuple[Rx, ...]"


@dataclass(frozen=True)
class AllOf:
    """Texts matching every expression."""

    parts: "tuple[Rx, ...]"


@dataclass(frozen=True)
class Not:
    """Texts not matching an expression."""

    part: "Rx"


@dataclass(frozen=True)
class Repeat:
    """An expression repeated; `most` is `None` without a limit."""

    part: "Rx"
    least: int
    most: int | None


@dataclass(frozen=True)
class _Start:
    """The anchor `^`."""


@dataclass(frozen=True)
class _End:
    """The anchor `$`."""


@dataclass(frozen=True)
class _Look:
    """Lookahead."""

    part: "Rx"
    positive: bool


Rx: TypeAlias = Chars | Sequence | AnyOf | AllOf | Not | Repeat | _Start | _End | _Look
"""An expression. Only parsed ones contain anchors and lookahead."""

ANY: Final = Repeat(Chars(ALL), 0, None)
"""Any text."""
EMPTY: Final = Sequence(())
"""The empty text."""
NOTHING: Final = AnyOf(())
"""No text."""
_BYTES: Final = LLTokenizer("byte")
_ZERO_WIDTH: Final = (_Start, _End, _Look)
_REPEAT: Final = re.compile(r"\{([0-9]{1,4000})(?:(,)([0-9]{0,4000}))?\}")
_GROUP: Final = re.compile(r"\?(?::|P?<[A-Za-z_]\w*>)")
_HEX: Final = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}|c([A-Za-z])")
_PROPERTY: Final = re.compile(r"([pP])\{(?:gc=|General_Category=)?(\w+)\}")
_LOW_SURROGATE: Final = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_INSTEAD: Final = ", which cannot be enforced"


def literal(text: str) -> Rx:
    """Returns an expression for a text."""
    return Sequence(tuple(Chars(((ord(char), ord(char)),)) for char in text))


def characters(text: str) -> Rx:
    """Returns an expression for a text with escapes; `ValueError` if it is malformed."""
    return _Parser(text).characters()


@lru_cache(256)
def parse_whole(pattern: str) -> Rx:
    """Parses an expression that must match a whole text.

    Raises:
        ValueError: it is malformed, too large or cannot be enforced; worded to follow "the pattern …".
    """
    return _follow(_Parser(pattern).parse(), EMPTY, at_start=True)


@lru_cache(256)
def parse_search(pattern: str) -> Rx:
    """Parses an expression that must match somewhere in a text, as JSON Schema's `pattern` does.

    Raises as `parse_whole`.
    """
    tree = _Parser(pattern).parse()
    at_start = _follow(tree, ANY, at_start=True)
    if isinstance(tree, Sequence) and tree.parts[:1] == (_Start(),):
        return at_start
    return _any_of((at_start, _sequence((ANY, _follow(tree, ANY, at_start=False)))))


class _Parser:
    """Recursive descent over an expression."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0
        self._alternatives = 0

    def parse(self) -> Rx:
        tree, size = self._any_of()
        if self._at < len(self._text):
            raise ValueError("closes a group that was not opened")
        if size > MAX_EXPANDED:
            _too_large()
        return tree

    def characters(self) -> Rx:
        parts = []
        while self._at < len(self._text):
            point = self._class_member()
            parts.append(Chars(point if isinstance(point, tuple) else ((_checked(point),) * 2,)))
        return Sequence(tuple(parts))

    def _any_of(self) -> tuple[Rx, int]:
        parts, total = [], 0
        while True:
            tree, size = self._sequence()
            parts.append(tree)
            total += size
            self._alternatives += 1
            if self._alternatives > MAX_ALTERNATIVES:
                raise ValueError(f"has more than {MAX_ALTERNATIVES} alternatives")
            if not self._skip("|"):
                return (parts[0] if len(parts) == 1 else AnyOf(tuple(parts))), total

    def _sequence(self) -> tuple[Rx, int]:
        parts, total = list[Rx](), 0
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            tree, size = self._repeated()
            parts.append(tree)
            total += size
        return Sequence(tuple(parts)), total

    def _repeated(self) -> tuple[Rx, int]:
        tree, size = self._atom()
        counts = self._counts()
        if counts is None:
            return tree, size
        if isinstance(tree, _ZERO_WIDTH):
            raise ValueError("repeats an anchor or a lookahead, which matches no text")  # noqa: TRY004
        self._skip("?")
        if self._counts() is not None:
            raise ValueError("has a repetition with nothing to repeat before it")
        least, most = counts
        if most is not None and most < least:
            raise ValueError("has a repetition with a minimum above its maximum")
        size *= max(least, most or 0, 1)
        if size > MAX_EXPANDED:
            _too_large()
        return Repeat(tree, least, most), size

    def _counts(self) -> tuple[int, int | None] | None:
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._skip(sign):
                return counts
        if found := _REPEAT.match(self._text, self._at):
            self._at = found.end()
            least = int(found[1])
            return least, (least if not found[2] else int(found[3]) if found[3] else None)
        return None

    def _atom(self) -> tuple[Rx, int]:
        char = self._text[self._at]
        self._at += 1
        match char:
            case "(":
                return self._group()
            case "[":
                return Chars(self._class()), 1
            case "\\":
                chars = self._escape(in_class=False)
                return Chars(chars if isinstance(chars, tuple) else ((chars, chars),)), 1
            case ".":
                return Chars(complement(NEWLINES)), 1
            case "^":
                return _Start(), 0
            case "$":
                return _End(), 0
            case "*" | "+" | "?" | "{" if char != "{" or _REPEAT.match(self._text, self._at - 1):
                raise ValueError(f"has {char!r} with nothing to repeat before it; write \\{char}")
            case _:
                return Chars(((_checked(ord(char)),) * 2,)), 1

    def _group(self) -> tuple[Rx, int]:
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise ValueError(f"nests more than {MAX_NESTING} groups")
        look = None
        for opening, positive in (("?=", True), ("?!", False)):
            if look is None and self._skip(opening):
                look = positive
        if look is None and self._text.startswith("?", self._at):
            if self._text.startswith(("?<=", "?<!"), self._at):
                raise ValueError(f"looks behind{_INSTEAD}; describe the text itself")
            found = _GROUP.match(self._text, self._at)
            if not found:
                raise ValueError(f"has a kind of group{_INSTEAD}; write (?:…)")
            self._at = found.end()
        tree, size = self._any_of()
        if not self._skip(")"):
            raise ValueError("has a group that is not closed")
        self._depth -= 1
        return (tree if look is None else _Look(tree, look)), size

    def _class(self) -> Charset:
        negated = self._skip("^")
        ranges: list[tuple[int, int]] = []
        while not self._skip("]"):
            first = self._class_member()
            if isinstance(first, tuple):
                # [^\s] must equal \S, which is smaller than its complement.
                ranges += first
                continue
            last = first
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                end = self._class_member()
                if isinstance(end, tuple):
                    raise ValueError("has a range that ends in a class")
                last = end
            if last < first:
                raise ValueError("has a range that ends before it begins")
            ranges.append((first, last))
        if not ranges and not negated:
            raise ValueError("has an empty class; list its characters, with a bracket as \\]")
        return complement(ranges) if negated else intersection(union(ranges), ALL)

    def _class_member(self) -> int | Charset:
        if self._at >= len(self._text):
            raise ValueError("has a class [ that is not closed")
        char = self._text[self._at]
        self._at += 1
        return self._escape(in_class=True) if char == "\\" else ord(char)

    def _escape(self, *, in_class: bool) -> int | Charset:
        """Reads an escape after its backslash: a character or a class."""
        if self._at >= len(self._text):
            raise ValueError("ends with a backslash")
        if found := _HEX.match(self._text, self._at):
            self._at = found.end()
            if found[4]:
                return ord(found[4].upper()) - 64
            point = int(found[1] or found[2] or found[3], 16)
            if 0xD800 <= point <= 0xDBFF and (low := _LOW_SURROGATE.match(self._text, self._at)):
                self._at = low.end()
                point = 0x10000 + ((point - 0xD800) << 10) + int(low[1], 16) - 0xDC00
            return _checked(point)
        if found := _PROPERTY.match(self._text, self._at):
            self._at = found.end()
            if not (chars := category(found[2])):
                raise ValueError(f"has the property {found[2]}{_INSTEAD}; use a general category")
            return chars if found[1] == "p" else complement(chars)
        letter = self._text[self._at]
        self._at += 1
        if letter in ESCAPE_CLASSES:
            return ESCAPE_CLASSES[letter]
        if letter in NAMED_ESCAPES:
            return NAMED_ESCAPES[letter]
        if letter == "b" and in_class:
            return 8
        if letter == "0" and not self._text[self._at : self._at + 1].isdigit():
            return 0
        if letter.isalnum():
            raise ValueError(f"has \\{letter}{_INSTEAD}; write the characters themselves")
        return ord(letter)

    def _skip(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) * found
        return found


def _checked(point: int) -> int:
    if point > 0x10FFFF or 0xD800 <= point <= 0xDFFF:
        raise ValueError(f"asks for U+{point:04X}, which is not a character")
    return point


def _too_large() -> NoReturn:
    raise ValueError(
        f"has more than {MAX_EXPANDED} characters once its repetitions are written out; repeat less"
    )


def _follow(tree: Rx, rest: Rx, *, at_start: bool) -> Rx:
    """Returns `tree` followed by `rest`, with anchors and lookahead resolved: they depend on what follows."""
    match tree:
        case _Start():
            return rest if at_start else NOTHING
        case _End():
            return _all_of((EMPTY, rest))
        case _Look(part, positive):
            seen = _follow(part, ANY, at_start=at_start)
            return _all_of((rest, seen if positive else Not(seen)))
        case AnyOf(parts) if _has_zero_width(tree):
            return _any_of(tuple(_follow(part, rest, at_start=at_start) for part in parts))
        case Sequence(parts):
            starts = []
            for part in parts:
                starts.append(at_start)
                at_start = at_start and _is_zero_width(part)
            for part, start in zip(reversed(parts), reversed(starts), strict=True):
                rest = _follow(part, rest, at_start=start)
            return rest
        case Repeat(part) if _has_zero_width(part):
            if (tree.least, tree.most) == (0, 1):
                return _any_of((rest, _follow(part, rest, at_start=at_start)))
            if (tree.least, tree.most) == (1, 1):
                return _follow(part, rest, at_start=at_start)
            raise ValueError(f"repeats a group with an anchor or a lookahead{_INSTEAD}")
        case _:
            return _sequence((tree, rest))


def _has_zero_width(tree: Rx) -> bool:
    match tree:
        case Sequence(parts) | AnyOf(parts):
            return any(map(_has_zero_width, parts))
        case Repeat(part):
            return _has_zero_width(part)
        case _:
            return isinstance(tree, _ZERO_WIDTH)


def _is_zero_width(tree: Rx) -> bool:
    match tree:
        case Sequence(parts) | AnyOf(parts):
            return all(map(_is_zero_width, parts))
        case _:
            return isinstance(tree, _ZERO_WIDTH)


def _sequence(parts: tuple[Rx, ...]) -> Rx:
    flat: list[Rx] = []
    for part in parts:
        flat += part.parts if isinstance(part, Sequence) else [part]
    if NOTHING in flat:
        return NOTHING
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def _any_of(parts: tuple[Rx, ...]) -> Rx:
    kept = tuple(dict.fromkeys(part for part in parts if part != NOTHING))
    return kept[0] if len(kept) == 1 else AnyOf(kept)


def _all_of(parts: tuple[Rx, ...]) -> Rx:
    if NOTHING in parts:
        return NOTHING
    kept = tuple(dict.fromkeys(part for part in parts if part != ANY))
    if EMPTY in kept:
        return EMPTY if all(matches(part, "") for part in kept) else NOTHING
    return ANY if not kept else kept[0] if len(kept) == 1 else AllOf(kept)


def matches(tree: Rx, text: str) -> bool:
    """Whether an expression matches a whole text."""
    matcher = _matcher(tree)
    if matcher.is_error():  # no text matches
        return False
    matcher.reset()
    data = list(text.encode(errors="surrogatepass"))
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@lru_cache(256)
def _matcher(tree: Rx) -> LLMatcher:
    return terminal_matcher(terminal(tree))


def terminal_matcher(body: str) -> LLMatcher:
    """Returns a matcher of single bytes for a terminal."""
    return LLMatcher(_BYTES, LLMatcher.grammar_from_lark(f"start: T\nT: {body}\n"), log_level=0)


def is_empty(body: str) -> bool:
    """Whether no text matches a terminal."""
    if "&" not in body:
        return False
    matcher = terminal_matcher(body)
    if matcher.is_error() or matcher.is_accepting():
        return matcher.is_error()
    return not any(matcher.compute_bitmask()[: 256 // 8])


# A text's characters inside quotation marks: most stand for themselves.
_UNSAFE: Final = [(0, 0x1F), (0x5C, 0x5C)]
_SHORT_ESCAPES: Final = {0x5C: "\\", 8: "b", 9: "t", 10: "n", 12: "f", 13: "r"}
# A character of a string without other constraints, written in any way.
_HIGH: Final = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW: Final = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
FREE_CHARACTER: Final = (
    r"/[^\x{22}\\\x{0}-\x{1f}]|\\[\x{22}\\\x{2f}bfnrt]"
    r"|\\u([0-9abcefABCEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})"
    f"|{_HIGH}{_LOW}/"
)
"""A terminal for one character of a JSON string, which may be escaped."""


def terminal(tree: Rx, *, quote: str = "") -> str:
    """Returns an expression as the body of a terminal.

    With a `quote`, it describes the characters of a string in such quotation marks, as in JSON or Python.
    """
    if isinstance(tree, Repeat) and tree.most == 0:
        return '""'
    text = _plain(tree, quote)
    if text is not None:
        return f"/{text}/" if text else '""'
    match tree:
        case Sequence(parts):
            return f"({' '.join(terminal(part, quote=quote) for part in parts)})"
        case AnyOf(parts):
            return f"({' | '.join(terminal(part, quote=quote) for part in parts)})"
        case AllOf(parts):
            return f"({' & '.join(terminal(part, quote=quote) for part in parts)})"
        case Not(part):
            everything = terminal(ANY, quote=quote)
            return f"({everything} & ~({terminal(part, quote=quote)}))"
        case Repeat(part, least, most):
            return f"({terminal(part, quote=quote)}){{{least},{'' if most is None else most}}}"
    raise AssertionError(tree)


def _plain(tree: Rx, quote: str) -> str | None:
    """Returns an expression without operators of terminals alone; `None` if it needs them."""
    match tree:
        case Chars(chars):
            return _chars_text(chars, quote)
        case Sequence(parts):
            texts = [_plain(part, quote) for part in parts]
            return None if None in texts else "".join(map(str, texts))
        case AnyOf(parts) if parts:
            texts = [_plain(part, quote) for part in parts]
            return None if None in texts else f"(?:{'|'.join(map(str, texts))})"
        case AnyOf():
            return r"[a&&b]"
        case Repeat(part, least, most):
            if (text := _plain(part, quote)) is None:
                return None
            sign = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
            counts = f"{{{least},{'' if most is None else most}}}"
            return f"(?:{text}){sign or counts}"
        case _:
            return None


@lru_cache(1024)
def _chars_text(chars: Charset, quote: str) -> str:
    if not quote:
        return class_text(chars) if chars else r"[a&&b]"
    escapes = {**_SHORT_ESCAPES, ord(quote): quote}
    unsafe = union([*_UNSAFE, (ord(quote), ord(quote))])
    safe, options = difference(chars, unsafe), []
    if safe:
        options.append(class_text(safe))
    for first, last in intersection(chars, unsafe):
        for point in range(first, last + 1):
            if point in escapes:
                options.append(f"\\\\\\x{{{ord(escapes[point]):x}}}")
            if point < 0x20:
                high, low = divmod(point, 16)
                options.append(f"\\\\u00{high}{low if low < 10 else f'[{low:x}{low:X}]'}")
    if not options:
        return r"[a&&b]"
    return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"
