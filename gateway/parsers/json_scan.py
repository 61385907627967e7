"""An incremental JSON scanner: finds the end of a value and checks it, without building it."""

import re
from collections.abc import Callable
from typing import Final

# Deepest nesting of arguments; readers of JSON (Python's among them) give up somewhere beyond it.
MAX_DEPTH: Final = 100

_SPACE: Final = " \t\n\r"
_BLANK: Final = re.compile(r"[ \t\n\r]*")
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER_PART: Final = re.compile(r"[-+.eE0-9]*")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_LITERALS: Final = {"t": "true", "f": "false", "n": "null"}


def skip_blanks(text: str, at: int = 0) -> int:
    """Returns the position of the first character at or after ``at`` that is not JSON white space."""
    match = _BLANK.match(text, at)
    assert match is not None
    return match.end()


def is_object(text: str) -> bool:
    """Whether ``text`` is exactly a JSON object, encodable in UTF-8."""
    scanner = ValueScanner()
    end = scanner.feed(text)
    if not scanner.done or skip_blanks(text, end) < len(text) or text[skip_blanks(text)] != "{":
        return False
    # Python's strings may hold halves of surrogate pairs, which UTF-8 cannot encode.
    return not any("\ud800" <= char <= "\udfff" for char in text)


def is_value(text: str) -> bool:
    """Whether ``text`` is exactly a JSON value."""
    scanner = ValueScanner()
    # A number ends only with the character after it.
    return bool(text) and scanner.feed(text + " ") == len(text) and scanner.done


class ValueScanner:
    """Follows a JSON value (RFC 8259, strictly)."""

    __slots__ = ("_key", "_left", "_number", "_stack", "_step", "done", "failed")

    done: bool
    """The value is complete."""
    failed: bool
    """The text is not JSON."""

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._stack: list[str] = []
        self._step: Callable[[str, int], int] = self._value
        # Whether the current string is a key.
        self._key = False
        # The rest of the current literal, or of an escape's four digits.
        self._left = ""
        self._number: list[str] = []

    def feed(self, text: str, at: int = 0) -> int:
        """Reads from ``at`` on.

        Returns:
            The position after the value's text: ``len(text)`` unless the value is complete or has failed.
        """
        while at < len(text) and not self.done and not self.failed:
            at = self._step(text, at)
        return at

    def _fail(self, at: int) -> int:
        self.failed = True
        return at

    def _value(self, text: str, at: int) -> int:
        char = text[at]
        if char in _SPACE:
            return skip_blanks(text, at)
        if char == '"':
            self._key, self._step = False, self._string
        elif char in "{[":
            if len(self._stack) == MAX_DEPTH:
                return self._fail(at)
            self._stack.append(char)
            self._step = self._first_key if char == "{" else self._first_item
        elif char in _LITERALS:
            self._left, self._step = _LITERALS[char][1:], self._literal
        elif char in "-0123456789":
            self._number, self._step = [], self._in_number
            return at
        else:
            return self._fail(at)
        return at + 1

    def _first_key(self, text: str, at: int) -> int:
        if text[at] == "}":
            return self._close(at)
        return self._next_key(text, at)

    def _next_key(self, text: str, at: int) -> int:
        if text[at] in _SPACE:
            return skip_blanks(text, at)
        if text[at] != '"':
            return self._fail(at)
        self._key, self._step = True, self._string
        return at + 1

    def _first_item(self, text: str, at: int) -> int:
        if text[at] in _SPACE:
            return skip_blanks(text, at)
        if text[at] == "]":
            return self._close(at)
        self._step = self._value
        return at

    def _string(self, text: str, at: int) -> int:
        match = _PLAIN.match(text, at)
        assert match is not None
        at = match.end()
        if at == len(text):
            return at
        if text[at] == "\\":
            self._step = self._escape
        elif text[at] != '"':
            return self._fail(at)
        elif self._key:
            self._step = self._colon
        else:
            self._ended()
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        if text[at] == "u":
            self._left, self._step = "0000", self._digits
        elif text[at] in '"\\/bfnrt':
            self._step = self._string
        else:
            return self._fail(at)
        return at + 1

    def _digits(self, text: str, at: int) -> int:
        if text[at] not in _HEX:
            return self._fail(at)
        self._left = self._left[1:]
        if not self._left:
            self._step = self._string
        return at + 1

    def _literal(self, text: str, at: int) -> int:
        if text[at] != self._left[0]:
            return self._fail(at)
        self._left = self._left[1:]
        if not self._left:
            self._ended()
        return at + 1

    def _in_number(self, text: str, at: int) -> int:
        match = _NUMBER_PART.match(text, at)
        assert match is not None
        self._number.append(match.group())
        if match.end() == len(text):
            return match.end()
        if _NUMBER.fullmatch("".join(self._number)) is None:
            return self._fail(match.end())
        self._ended()
        return match.end()

    def _colon(self, text: str, at: int) -> int:
        if text[at] in _SPACE:
            return skip_blanks(text, at)
        if text[at] != ":":
            return self._fail(at)
        self._step = self._value
        return at + 1

    def _after(self, text: str, at: int) -> int:
        char, inside = text[at], self._stack[-1]
        if char in _SPACE:
            return skip_blanks(text, at)
        if char == ",":
            self._step = self._next_key if inside == "{" else self._value
            return at + 1
        if char == ("}" if inside == "{" else "]"):
            return self._close(at)
        return self._fail(at)

    def _close(self, at: int) -> int:
        self._stack.pop()
        self._ended()
        return at + 1

    def _ended(self) -> None:
        self.done = not self._stack
        self._step = self._after
