r"""Regular expressions, in the form that xgrammar 0.2.8 takes as it is meant; what it would ignore or get wrong is refused.

It matches whole texts, so an anchor is right at an edge of the expression and means nothing elsewhere. It drops lookahead with a warning, and
takes the letter for an escape that it does not know. ``.`` is any character but the end of a line, as in Python and ECMAScript; xgrammar's is
any character.

In a JSON string it writes the characters of an expression as they are, unescaped. So there, sets of characters lose what JSON has to escape,
and an expression that asks for such a character is refused.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from protos.errors import InvalidArgument
from worker_svc.grammars.lowering.charsets import (
    CLASSES,
    NEWLINES,
    UNSAFE,
    code_point,
    complement,
    elements_of,
    minus,
    read_class,
    union,
    written_out,
)
from worker_svc.grammars.lowering.limits import MAX_ALTERNATIVES, MAX_EXPANDED, MAX_NESTING

# What is never closed goes on to the end: every character is read once, whatever the text.
_TOKENS: Final = re.compile(
    r"""(?P<escape>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]{1,6}\}|c[A-Za-z]|.|\Z))
      | (?P<class>\[\^?(?:\\.|[^\]\\])*(?:\]|\\?\Z))
      | (?P<look>\(\?<?[=!])
      | (?P<open>\((?:\?(?::|P?<[A-Za-z_]\w*>))?)
      | (?P<close>\))
      | (?P<or>\|)
      | (?P<anchor>[\^$])
      | (?P<repeat>[*+?]\??|\{(?P<least>[0-9]{1,9})(?P<comma>,(?P<most>[0-9]{0,9}))?\}\??)
      | (?P<literal>.)""",
    re.VERBOSE | re.DOTALL,
)
_KNOWN_ESCAPES: Final = frozenset("tnvfrae")
_IN_JSON: Final = ", which does not stand in a JSON string as it is"
_KNOWN_IN_CLASSES: Final = _KNOWN_ESCAPES | CLASSES.keys() | {"b", "0"}
_UNKNOWN: Final = ", which cannot be enforced; write the characters that are meant"
_DOT: Final = complement(NEWLINES)
_NUL: Final = union([(0, 0)])


def lower_regex(pattern: str, param: str, *, in_json: bool = False) -> str:
    """An expression that xgrammar enforces and that matches nothing which ``pattern`` does not.

    Args:
        pattern: the expression.
        param: the parameter that an error names.
        in_json: whether its matches stand in a JSON string.

    Raises:
        InvalidArgument: naming what to change.
    """
    try:
        return "".join(_lowered(pattern, in_json))
    except ValueError as error:
        shown = pattern if len(pattern) <= 60 else f"{pattern[:60]}…"
        raise InvalidArgument(f"the pattern {shown!r} {error}", param=param) from None


def is_flat(pattern: str) -> bool:
    """Whether an expression has neither groups nor alternatives."""
    return all(token.lastgroup not in ("open", "or") for token in _TOKENS.finditer(pattern))


@dataclass
class _Group:
    """What is open: how large it is when its repetitions are written out."""

    size: int = 0
    last: int = 0
    """Of that, what a repetition behind it would repeat; 0 if there is nothing to repeat."""


@dataclass
class _Shape:
    """Bounds of a whole expression."""

    groups: list[_Group] = field(default_factory=lambda: [_Group()])
    alternatives: int = 0

    def take(self, kind: str, token: re.Match[str]) -> None:
        """Counts a piece.

        Raises:
            ValueError: saying what is beyond a bound, or wrong.
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
            self._add(self.groups[-1], max(closed.size, 1))
        elif kind == "repeat":
            if not top.last:
                raise ValueError(f"has {token.group()!r} with nothing to repeat in front of it")
            self._repeat(top, token)
        elif kind in ("or", "anchor"):
            top.last = 0
            self.alternatives += kind == "or"
            if self.alternatives > MAX_ALTERNATIVES:
                raise ValueError(f"has more than {MAX_ALTERNATIVES} alternatives")
        else:
            self._add(top, 1)

    def _repeat(self, top: _Group, token: re.Match[str]) -> None:
        least, most = int(token["least"] or 1), int(token["most"] or 0)
        if token["most"] and most < least:
            raise ValueError(f"has {token.group()}, whose least is above its most")
        once, top.last = top.last, 0
        self._add(top, once * (max(least, most, 1) - 1))
        top.last = 0

    def _add(self, group: _Group, size: int) -> None:
        group.size += size
        group.last = size
        if group.size > MAX_EXPANDED:
            raise ValueError(
                f"has more than {MAX_EXPANDED} characters once its repetitions are written out; repeat less often"
            )


def _lowered(pattern: str, in_json: bool) -> Iterator[str]:
    if not pattern:
        raise ValueError("is empty; leave it out, or write what it should match")
    if "\0" in pattern:
        raise ValueError("contains a NUL character")
    shape = _Shape()
    edges = _edges(pattern)
    for token in _TOKENS.finditer(pattern):
        kind, text = token.lastgroup or "", token.group()
        shape.take(kind, token)
        if kind == "look":
            raise ValueError(
                "looks ahead or behind, which cannot be enforced; write what the text may be instead"
            )
        if kind == "anchor" and (token.start() - 1 if text == "^" else token.end()) not in edges:
            raise ValueError(
                "has an anchor elsewhere than at its ends; put alternatives into a group: ^(a|b)$"
            )
        if kind == "open":
            if text == "(" and pattern.startswith("?", token.end()):
                raise ValueError("has a group of a kind that cannot be enforced; write (?:…)")
            yield "(?:" if len(text) > 1 else text
        elif kind == "escape":
            yield _escape(text, in_json)
        elif kind == "class":
            yield _class(text, in_json)
        elif kind == "literal":
            yield _literal(text, in_json)
        else:
            yield text
    if len(shape.groups) > 1:
        raise ValueError("has a group that is not closed")


def _edges(pattern: str) -> set[int]:
    """Where alternatives of the whole expression are split, its ends among them."""
    depth, edges = 0, {-1, len(pattern)}
    for token in _TOKENS.finditer(pattern):
        depth += (token.lastgroup == "open") - (token.lastgroup == "close")
        if token.lastgroup == "or" and not depth:
            edges.add(token.start())
    return edges


def _escape(text: str, in_json: bool) -> str:
    letter = text[1:2]
    if letter in CLASSES:
        return written_out(minus(CLASSES[letter], UNSAFE if in_json else _NUL))
    if not letter:
        raise ValueError("ends with a backslash")
    if letter.isalnum() and len(text) == 2 and letter not in _KNOWN_ESCAPES:
        raise ValueError(f"has {text}{_UNKNOWN}")
    return _point(code_point(text), text, in_json)


def _literal(text: str, in_json: bool) -> str:
    if text == ".":
        return written_out(minus(_DOT, UNSAFE if in_json else _NUL))
    if text in "[{":
        raise ValueError(f"has {text!r} that begins nothing; write \\{text}")
    return _point(ord(text), text, in_json) if in_json else text


def _point(point: int, text: str, in_json: bool) -> str:
    """One character, outside of sets."""
    if point == 0 or point > 0x10FFFF or 0xD800 <= point <= 0xDFFF:
        raise ValueError(f"asks for {text}, which is no character of a text")
    if in_json and any(first <= point <= last for first, last in UNSAFE):
        what = "a control character" if point < 0x20 else "a quote or a backslash"
        raise ValueError(f"asks for {what}{_IN_JSON}")
    if not in_json or (len(text) <= 2 and text.isascii() and text.isprintable()):
        return text
    return written_out(union([(point, point)]))


def _class(text: str, in_json: bool) -> str:
    negated = text.startswith("[^")
    inside = text[1 + negated : -1]
    if not text.endswith("]") or len(text) < 2 or _ends_in_escape(inside):
        raise ValueError("has a class [ that is not closed")
    if not inside:
        raise ValueError("has an empty class; write the characters that are meant, a bracket as \\]")
    elements = elements_of(inside)
    _check_escapes(elements)
    chars, written = read_class(elements, negated=negated)
    if any(point > 0x10FFFF for point in written):
        raise ValueError("asks for what is no character of a text")
    if in_json and not negated:
        for point in written:
            _point(point, "", in_json=True) if point else None
            if point == 0:
                raise ValueError(f"asks for a control character{_IN_JSON}")
    allowed = minus(chars, UNSAFE if in_json else _NUL)
    if not allowed:
        raise ValueError(f"has the class {text}, of which no character is left that can be enforced")
    return written_out(allowed)


def _check_escapes(elements: list[str]) -> None:
    r"""For escapes in a class.

    Raises:
        ValueError: for what is unknown, cut off (``\x4``), or octal, which not all readers know (``\012``).
    """
    for element, behind in zip(elements, [*elements[1:], ""], strict=True):
        known = len(element) != 2 or not element[1].isalnum() or element[1] in _KNOWN_IN_CLASSES
        if not known or (element == r"\0" and "0" <= behind <= "9"):
            shown = element if not known else element + behind
            raise ValueError(f"has {shown}{_UNKNOWN}")


def _ends_in_escape(inside: str) -> bool:
    """Whether the bracket behind it is escaped."""
    return (len(inside) - len(inside.rstrip("\\"))) % 2 == 1
