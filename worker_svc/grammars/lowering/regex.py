r"""Lowers regular expressions to a form that xgrammar 0.2.8 matches as intended; refuses the rest.

xgrammar matches whole texts, so an anchor is redundant at the ends of an expression and meaningless
elsewhere. It drops lookaround with a warning and reads an unknown escape as its letter. Its `.` matches any
character; here, as in Python and ECMAScript, `.` matches any character except line ends.

Inside a JSON string, xgrammar writes matched characters unescaped. There, character sets lose the characters
that JSON must escape, and an expression that requires such a character is refused.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from worker_svc.grammars.lowering.charsets import (
    ESCAPE_CLASSES,
    JSON_UNSAFE,
    NEWLINES,
    class_pattern,
    code_point,
    complement,
    difference,
    parse_class,
    split_class,
    union,
)
from worker_svc.grammars.lowering.limits import MAX_ALTERNATIVES, MAX_EXPANDED, MAX_NESTING
from worker_svc.grammars.lowering.refusals import refusal

# An unclosed class extends to the end of the text, so every text is tokenized in linear time.
_TOKENS: Final = re.compile(
    r"""(?P<escape>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]{1,6}\}|c[A-Za-z]|.|\Z))
      | (?P<class>\[\^?(?:\\.|[^\]\\])*(?:\]|\\?\Z))
      | (?P<look>\(\?<?[=!])
      | (?P<open>\((?:\?(?::|P?<[A-Za-z_]\w*>))?)
      | (?P<close>\))
      | (?P<or>\|)
      | (?P<anchor>[\^$])
      | (?P<repeat>[*+?]\??|\{(?P<least>[0-9]{1,9})(?:,(?P<most>[0-9]{0,9}))?\}\??)
      | (?P<literal>.)""",
    re.VERBOSE | re.DOTALL,
)
_KNOWN_ESCAPES: Final = frozenset("tnvfrae")
_IN_JSON: Final = ", which a JSON string cannot hold unescaped"
_KNOWN_IN_CLASSES: Final = _KNOWN_ESCAPES | ESCAPE_CLASSES.keys() | {"b", "0"}
_UNKNOWN: Final = ", which cannot be enforced; write the characters themselves"
_DOT: Final = complement(NEWLINES)
_NUL: Final = union([(0, 0)])


def lower_regex(pattern: str, *, in_json: bool = False) -> str:
    """Returns an expression that xgrammar enforces and that matches nothing `pattern` does not.

    Args:
        pattern: the client's expression.
        in_json: whether its matches stand inside a JSON string.

    Raises:
        InvalidArgument: says what to change.
    """
    try:
        return "".join(_lowered(pattern, in_json))
    except ValueError as error:
        shown = pattern if len(pattern) <= 60 else f"{pattern[:60]}…"
        raise refusal(f"the pattern {shown!r} {error}") from None


def is_flat(pattern: str) -> bool:
    """Whether an expression has neither groups nor alternatives."""
    return all(token.lastgroup not in ("open", "or") for token in _TOKENS.finditer(pattern))


@dataclass
class _Group:
    """An open group."""

    size: int = 0
    """Characters so far, with repetitions written out."""
    last: int = 0
    """Characters that a following repetition would repeat; 0 if there is nothing to repeat."""


@dataclass
class _Structure:
    """Checks the nesting and the size of an expression, token by token."""

    groups: list[_Group] = field(default_factory=lambda: [_Group()])
    """Open groups, outermost first; the first is the whole expression."""
    alternatives: int = 0
    """Alternatives so far."""

    def add(self, kind: str, token: re.Match[str]) -> None:
        """Adds a token.

        Raises:
            ValueError: the expression is malformed or exceeds a limit.
        """
        top = self.groups[-1]
        if kind == "open":
            self.groups.append(_Group())
            if len(self.groups) > MAX_NESTING + 1:
                raise ValueError(f"nests more than {MAX_NESTING} groups")
        elif kind == "close":
            if len(self.groups) == 1:
                raise ValueError("closes a group that was not opened")
            closed = self.groups.pop()
            self._grow(self.groups[-1], max(closed.size, 1))
        elif kind == "repeat":
            if not top.last:
                raise ValueError(f"has {token.group()!r} with nothing to repeat before it")
            self._repeat(top, token)
        elif kind in ("or", "anchor"):
            top.last = 0
            self.alternatives += kind == "or"
            if self.alternatives > MAX_ALTERNATIVES:
                raise ValueError(f"has more than {MAX_ALTERNATIVES} alternatives")
        else:
            self._grow(top, 1)

    def _repeat(self, top: _Group, token: re.Match[str]) -> None:
        least, most = int(token["least"] or 1), int(token["most"] or 0)
        if token["most"] and most < least:
            raise ValueError(f"has {token.group()} with a minimum above its maximum")
        once, top.last = top.last, 0
        self._grow(top, once * (max(least, most, 1) - 1))
        top.last = 0

    def _grow(self, group: _Group, size: int) -> None:
        group.size += size
        group.last = size
        if group.size > MAX_EXPANDED:
            raise ValueError(
                f"has more than {MAX_EXPANDED} characters once its repetitions are written out; repeat less"
            )


def _lowered(pattern: str, in_json: bool) -> Iterator[str]:
    """Yields the lowered tokens.

    Raises:
        ValueError: the pattern is malformed, exceeds a limit or cannot be enforced.
    """
    if not pattern:
        raise ValueError("is empty; omit it, or write what it should match")
    if "\0" in pattern:
        raise ValueError("contains a NUL character")
    structure = _Structure()
    edges = _edges(pattern)
    for token in _TOKENS.finditer(pattern):
        kind, text = token.lastgroup or "", token.group()
        structure.add(kind, token)
        if kind == "look":
            raise ValueError(
                "looks ahead or behind, which cannot be enforced; describe the text itself instead"
            )
        if kind == "anchor" and (token.start() - 1 if text == "^" else token.end()) not in edges:
            raise ValueError(
                "has an anchor that is not at its start or end; put alternatives into a group: ^(a|b)$"
            )
        if kind == "open":
            if text == "(" and pattern.startswith("?", token.end()):
                raise ValueError("has a kind of group that cannot be enforced; write (?:…)")
            yield "(?:" if len(text) > 1 else text
        elif kind == "escape":
            yield _escape(text, in_json)
        elif kind == "class":
            yield _class(text, in_json)
        elif kind == "literal":
            yield _literal(text, in_json)
        else:
            yield text
    if len(structure.groups) > 1:
        raise ValueError("has a group that is not closed")


def _edges(pattern: str) -> set[int]:
    """Returns the positions of top-level `|`, and -1 and the length: anchors are allowed next to these."""
    depth, edges = 0, {-1, len(pattern)}
    for token in _TOKENS.finditer(pattern):
        depth += (token.lastgroup == "open") - (token.lastgroup == "close")
        if token.lastgroup == "or" and not depth:
            edges.add(token.start())
    return edges


def _escape(text: str, in_json: bool) -> str:
    letter = text[1:2]
    if letter in ESCAPE_CLASSES:
        return class_pattern(difference(ESCAPE_CLASSES[letter], JSON_UNSAFE if in_json else _NUL))
    if not letter:
        raise ValueError("ends with a backslash")
    if letter.isalnum() and len(text) == 2 and letter not in _KNOWN_ESCAPES:
        raise ValueError(f"has {text}{_UNKNOWN}")
    return _single(code_point(text), text, in_json)


def _literal(text: str, in_json: bool) -> str:
    if text == ".":
        return class_pattern(difference(_DOT, JSON_UNSAFE if in_json else _NUL))
    if text in "[{":
        raise ValueError(f"has {text!r} that opens nothing; write \\{text}")
    return _single(ord(text), text, in_json) if in_json else text


def _single(point: int, text: str, in_json: bool) -> str:
    """Lowers one character outside a set; `text` is its spelling in the expression."""
    if point == 0:
        raise ValueError(f"asks for {text}, which is not a character")
    _check_point(point, text, in_json)
    if not in_json or (len(text) <= 2 and text.isascii() and text.isprintable()):
        return text
    return class_pattern(union([(point, point)]))


def _check_point(point: int, text: str, in_json: bool) -> None:
    """Checks that text can hold a character.

    Raises:
        ValueError: it is a surrogate, beyond Unicode, or would have to be escaped in JSON.
    """
    if point > 0x10FFFF or 0xD800 <= point <= 0xDFFF:
        raise ValueError(f"asks for {text}, which is not a character")
    if in_json and any(first <= point <= last for first, last in JSON_UNSAFE):
        what = "a control character" if point < 0x20 else "a quote or a backslash"
        raise ValueError(f"asks for {what}{_IN_JSON}")


def _class(text: str, in_json: bool) -> str:
    negated = text.startswith("[^")
    inside = text[1 + negated : -1]
    if not text.endswith("]") or len(text) < 2 or _ends_in_escape(inside):
        raise ValueError("has a class [ that is not closed")
    if not inside:
        raise ValueError("has an empty class; list its characters, with a bracket as \\]")
    elements = split_class(inside)
    _check_escapes(elements)
    chars, literals = parse_class(elements, negated=negated)
    if any(point > 0x10FFFF for point in literals):
        raise ValueError("asks for a code point that is not a character")
    if in_json and not negated:
        for point in literals:
            _check_point(point, f"U+{point:04X}", in_json)
    allowed = difference(chars, JSON_UNSAFE if in_json else _NUL)
    if not allowed:
        raise ValueError(f"has the class {text} without a character that can be enforced")
    return class_pattern(allowed)


def _check_escapes(elements: list[str]) -> None:
    r"""Checks the escapes in a class.

    Raises:
        ValueError: an escape is unknown, cut off (`\x4`) or octal (`\012`), which not all regex engines
            support.
    """
    for element, following in zip(elements, [*elements[1:], ""], strict=True):
        known = len(element) != 2 or not element[1].isalnum() or element[1] in _KNOWN_IN_CLASSES
        if not known or (element == r"\0" and "0" <= following <= "9"):
            shown = element if not known else element + following
            raise ValueError(f"has {shown}{_UNKNOWN}")


def _ends_in_escape(inside: str) -> bool:
    """Whether `inside` ends in an unpaired backslash, which escapes the closing bracket."""
    return (len(inside) - len(inside.rstrip("\\"))) % 2 == 1
