"""The pythonic format.

::

    [get_weather(city="Paris", days=3), get_time()]

Sources: Meta's prompt formats of Llama 3.2 and 4 (which may put ``<|python_start|>`` and ``<|python_end|>``
around it) and ToolACE. The list begins the answer, its calls name tools of the request, and arguments are
keyword literals. ``ast`` parses the values; they are never run. A call is emitted whole, because half a
Python literal has no JSON.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Collection
from typing import Any, Final

from gateway.parsers.events import CallArguments, CallCounter, Event, Text
from gateway.parsers.parser_base import ParserBase

START: Final = "<|python_start|>"
END: Final = "<|python_end|>"

_NAME: Final = re.compile(r"\s*([A-Za-z_][\w.-]*)\(")
_MAX_NAME: Final = 256
_KEYWORD: Final = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)")
_MAX_DEPTH: Final = 60
_JSON_NAMES: Final = {"true": True, "false": False, "null": None}


class _Call:
    """Finds the end of ``f(…)`` and the boundaries of its arguments."""

    arguments: list[str]
    """The text of each complete argument."""
    done: bool
    """The closing parenthesis has arrived."""
    failed: bool
    """The closing parenthesis cannot arrive any more."""

    def __init__(self) -> None:
        self.arguments = []
        self.done = False
        self.failed = False
        self._brackets = ["("]
        self._quote = ""
        self._escaped = False
        self._argument: list[str] = []

    def feed(self, text: str) -> str:
        """Consumes the text of the call; returns the rest."""
        for at, char in enumerate(text):
            if self._quote:
                self._in_string(char)
            else:
                self._outside(char)
            if self.done or self.failed:
                return text[at + 1 :]
        return ""

    def _in_string(self, char: str) -> None:
        self._argument.append(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == self._quote:
            self._quote = ""

    def _outside(self, char: str) -> None:
        if char in "\"'":
            self._quote = char
        elif char in "([{":
            self._brackets.append(char)
            self.failed = len(self._brackets) > _MAX_DEPTH
        elif char in ")]}":
            self.failed = self._brackets.pop() + char not in ("()", "[]", "{}")
            self.done = not self._brackets and not self.failed
        if self.done or (char == "," and len(self._brackets) == 1):
            self.arguments.append("".join(self._argument))
            self._argument = []
        else:
            self._argument.append(char)


def _literal(node: ast.expr) -> Any:
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
            names = [_literal(key) if key is not None else None for key in keys]
            if not all(isinstance(name, str) for name in names):
                raise ValueError("JSON's keys are text")
            return dict(zip(names, map(_literal, values), strict=True))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
    raise ValueError("not a literal")


def _as_json(arguments: list[str]) -> str | None:
    """Returns keyword arguments as a JSON object; ``None`` if they are not keyword literals."""
    if arguments and not arguments[-1].strip():
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


class PythonicParser(ParserBase):
    """Implements :class:`gateway.parsers.events.ToolParser`."""

    def __init__(self, new_id: Callable[[], str], names: Collection[str]) -> None:
        """Reads calls of the tools ``names``."""
        super().__init__(self._begin)
        self._counter = CallCounter(new_id)
        self._names = names
        self._call: _Call | None = None
        self._name = ""

    # Text set aside is content if the list turns out not to be one.

    def _begin(self, _: list[Event]) -> bool:
        if not self._skip() or (START.startswith(self._rest) and self._rest != START):
            return False
        if self._rest.startswith(START):
            self._pass(len(START))
        self._state = self._list
        return True

    def _list(self, _: list[Event]) -> bool:
        if not self._skip():
            return False
        if self._rest[0] != "[":
            return self._give_up()
        self._pass(1)
        self._state = self._item
        return True

    def _item(self, _: list[Event]) -> bool:
        if not self._skip():
            return False
        at = self._rest.find("(", 0, _MAX_NAME)
        if at < 0 and len(self._rest) < _MAX_NAME:
            return False
        name = _NAME.fullmatch(self._rest, 0, at + 1) if at >= 0 else None
        if name is None or name[1] not in self._names:
            return self._give_up()
        self._name, self._call = name[1], _Call()
        self._pass(at + 1)
        self._state = self._in_call
        return True

    def _in_call(self, out: list[Event]) -> bool:
        assert self._call is not None
        self._pass(len(self._rest) - len(self._call.feed(self._rest)))
        if not self._call.done and not self._call.failed:
            return False
        arguments = _as_json(self._call.arguments) if self._call.done else None
        self._call = None
        if arguments is None:
            return self._give_up()
        self._passed()
        start = self._counter.start(self._name)
        out.extend((start, CallArguments(start.number, arguments)))
        self._state = self._behind
        return True

    def _behind(self, _: list[Event]) -> bool:
        if not self._skip():
            return False
        match self._rest[0]:
            case ",":
                self._pass(1)
                self._state = self._item
            case "]":
                self._passed()
                self._rest, self._state = self._rest[1:], self._behind_list
            case _:
                return self._give_up()
        return True

    def _behind_list(self, _: list[Event]) -> bool:
        return self._close(END, self._text)

    def _give_up(self) -> bool:
        """Ends the list: all remaining text is content."""
        self._back()
        self._state = self._text
        return True

    def _text(self, out: list[Event]) -> bool:
        out.append(Text(self._rest))
        self._rest = ""
        return False

    def _end(self, out: list[Event]) -> None:
        if self._state not in (self._behind, self._behind_list):
            super()._end(out)
