"""Calls written as Python calls with keyword literals: ``get_weather(city="Paris", days=3)``.

Sources: Meta's prompt formats of Llama 3.2 and 4, ToolACE, LFM2 and OLMo 3. ``ast`` parses the values; they
are never run. A call is emitted whole, because half a Python literal has no JSON.
"""

import ast
import itertools
import json
import re
import warnings
from typing import Any, Final

from gateway.parsers.call_reader import MAX_NAME, CallContext, CallReader, match_end
from gateway.parsers.events import Event
from gateway.parsers.formats import Python

_NAME: Final = re.compile(r"[\w.-]*")
_KEYWORD: Final = re.compile(r"\s*([^\W\d]\w*)\s*=(?!=)")
_PLAIN: Final = re.compile(r"[^\"'()\[\]{},]*")
_IN_STRING: Final = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}
_CLOSING: Final = {"(": ")", "[": "]", "{": "}"}
_MAX_DEPTH: Final = 60
_JSON_NAMES: Final = {"true": True, "false": False, "null": None}


class PythonCall(CallReader):
    """Reads a call; see :class:`CallReader`."""

    def __init__(
        self,
        form: Python,  # noqa: ARG002 - as other readers
        context: CallContext,
    ) -> None:
        """Waits for the call; see :class:`CallContext`."""
        super().__init__(context, self._name)
        self._called = ""
        # Closing brackets still to come, and the quotation marks around the current string.
        self._closing = [")"]
        self._quotes = ""
        # The text between the parentheses so far, its length, and the places of the commas between arguments.
        self._arguments: list[str] = []
        self._length = 0
        self._commas: list[int] = []

    def _name(self, _: list[Event]) -> bool:
        if not self._skip():
            return False
        end = match_end(_NAME, self._rest)
        if end == len(self._rest) and end <= MAX_NAME:
            return False
        name = self._rest[:end]
        if not 0 < end <= MAX_NAME or self._rest[end] != "(" or not self._accept(name):
            return self._fail()
        self._called = name
        self._take(end + 1)
        self._state = self._inside
        return True

    def _inside(self, out: list[Event]) -> bool:
        """Reads up to the closing parenthesis of the call."""
        at = 0
        while self._closing and not self.failed:
            end = self._in_string(at) if self._quotes else self._outside(at)
            if end == at:
                break
            at = end
        self._arguments.append(self._take(at))
        self._length += at
        if not self._closing:
            self._end(out)
        return False

    def _outside(self, at: int) -> int:
        """Returns the position after the next piece of text outside strings; ``at`` if it is incomplete."""
        end = match_end(_PLAIN, self._rest, at)
        char = self._rest[end : end + 1]
        match char:
            case "":
                return end
            case "'" | '"':
                return self._open_string(char, end)
            case "(" | "[" | "{":
                self._closing.append(_CLOSING[char])
                self.failed = len(self._closing) > _MAX_DEPTH
            case ",":
                if len(self._closing) == 1:
                    self._commas.append(self._length + end)
            case _:
                self.failed = self._closing.pop() != char
        return end + 1

    def _open_string(self, quote: str, at: int) -> int:
        quotes = self._rest[at : at + 3]
        if quotes in (quote, quote * 2):
            # A third quotation mark may follow.
            return at
        if quotes.startswith(quote * 2) and quotes != quote * 3:
            return at + 2
        self._quotes = quote * 3 if quotes == quote * 3 else quote
        return at + len(self._quotes)

    def _in_string(self, at: int) -> int:
        end = match_end(_IN_STRING[self._quotes[0]], self._rest, at)
        if self._rest.startswith("\\", end):
            return end + 2 if end + 2 <= len(self._rest) else end
        if self._rest.startswith(self._quotes, end):
            end += len(self._quotes)
            self._quotes = ""
        elif not self._quotes.startswith(self._rest[end:]):
            # Fewer quotation marks than those that end the string.
            end += 1
        return end

    def _end(self, out: list[Event]) -> None:
        text = "".join(self._arguments)[:-1]
        borders = [-1, *self._commas, len(text)]
        arguments = _as_json([text[start + 1 : end] for start, end in itertools.pairwise(borders)])
        if arguments is None:
            self._fail()
            return
        self._announce(self._called, out)
        self._emit(arguments, out)
        self.done = True


def _as_json(arguments: list[str]) -> str | None:
    """Returns keyword arguments as a JSON object; ``None`` if they are not keyword literals."""
    if not arguments[-1].strip():
        arguments = arguments[:-1]
    found: dict[str, Any] = {}
    try:
        for argument in arguments:
            keyword = _KEYWORD.match(argument)
            value = argument[keyword.end() :].strip() if keyword else ""
            if keyword is None or keyword[1] in found or not value:
                return None
            with warnings.catch_warnings():
                # Python warns about "\d"; for the model it is a backslash.
                warnings.simplefilter("ignore")
                # In parentheses, as in the call: line breaks do not matter.
                tree = ast.parse(f"({value})", mode="eval")
            found[keyword[1]] = _literal(tree.body)
        # Python's strings may hold halves of surrogate pairs, which encode() refuses.
        return json.dumps(found, ensure_ascii=False, allow_nan=False).encode().decode()
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr | None) -> Any:
    """Returns a literal's value in JSON's types.

    Raises:
        ValueError: if ``node`` is not a literal.
    """
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return dict(zip(map(_key, keys), map(_literal, values), strict=True))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
    raise ValueError("not a literal")


def _key(node: ast.expr | None) -> str:
    """Returns a key of JSON: the text, or a number, truth value or ``None`` as JSON writes it."""
    value = _literal(node)
    if isinstance(value, list | dict):
        raise ValueError("not a key")  # noqa: TRY004 - as the caller catches
    return value if isinstance(value, str) else json.dumps(value, allow_nan=False)
