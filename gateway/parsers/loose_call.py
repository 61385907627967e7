"""Calls written as a name and an object without quoted keys: ``f{city:<|"|>Paris<|"|>,days:3}``.

Source: the chat template of Gemma 4. The model also writes keys in quotation marks, texts in those of JSON or
Python or in none, and ``=`` for ``:``.
"""

import ast
import json
import re
from typing import Final, NamedTuple

from gateway.parsers.call_reader import MAX_NAME, CallContext, CallReader, match_end
from gateway.parsers.events import Event
from gateway.parsers.formats import LooseObject
from gateway.parsers.json_scan import MAX_DEPTH, skip_blanks
from gateway.parsers.parser_base import split_at
from gateway.parsers.values import Schema, as_json, item_schema, property_schema, quoted, types

_NAME: Final = re.compile(r"[\w.:/-]*")
_KEY: Final = re.compile(r"[^:={}\[\],]*")
_BARE: Final = re.compile(r"[^,}\]]*")
_PLAIN: Final = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}


class _Container(NamedTuple):
    """An object or array that is still open."""

    end: str
    schema: Schema


class LooseCall(CallReader):
    """Reads a call and writes its arguments as JSON. Texts are emitted as they arrive."""

    def __init__(self, form: LooseObject, context: CallContext) -> None:
        """Waits for the call; see :class:`CallContext`."""
        super().__init__(context, self._name)
        self._quote = form.quote
        self._root: Schema = None
        self._open: list[_Container] = []
        # Whether the current container has no members or items yet.
        self._first = True
        # Of the current value: its schema, its text so far unless that is emitted already, the quotation mark
        # around it, and all of it up to the second quotation mark.
        self._value_schema: Schema = None
        self._held: list[str] = []
        self._streams = True
        self._mark = ""
        self._marked = ""

    def _name(self, out: list[Event]) -> bool:
        if not self._skip():
            return False
        end = match_end(_NAME, self._rest)
        after = skip_blanks(self._rest, end)
        if after == len(self._rest) and end <= MAX_NAME:
            return False
        name = self._rest[:end]
        if not 0 < end <= MAX_NAME or self._rest[after] != "{" or not self._accept(name):
            return self._fail()
        self._take(after)
        self._value_schema = self._root = self._schema(name)
        self._announce(name, out)
        return self._enter(out)

    def _enter(self, out: list[Event]) -> bool:
        """Begins an object or array."""
        if len(self._open) == MAX_DEPTH:
            return self._fail()
        bracket = self._take(1)
        self._open.append(_Container("}" if bracket == "{" else "]", self._value_schema))
        self._first, self._state = True, self._next
        self._emit(bracket, out)
        return True

    def _next(self, out: list[Event]) -> bool:
        """Before a member, an item, or the end of the container."""
        if not self._skip():
            return False
        container = self._open[-1]
        if self._rest[0] == ",":
            self._take(1)
        elif self._rest[0] == container.end:
            self._emit(self._take(1), out)
            self._open.pop()
            self._first, self.done = False, not self._open
        elif container.end == "]":
            self._value_schema = item_schema(container.schema, self._root)
            self._begin_value("", out)
        else:
            return self._key(out)
        return True

    def _begin_value(self, key: str, out: list[Event]) -> None:
        self._emit(("" if self._first else ", ") + key, out)
        self._first, self._state = False, self._value

    def _key(self, out: list[Event]) -> bool:
        if self._quote.startswith(self._rest):
            return False
        mark = next((mark for mark in (self._quote, '"', "'") if self._rest.startswith(mark)), "")
        if mark:
            end = self._rest.find(mark, len(mark))
            after = end + len(mark) if end >= 0 else len(self._rest)
        else:
            end = after = match_end(_KEY, self._rest)
        at = skip_blanks(self._rest, after)
        if at > MAX_NAME:
            return self._fail()
        if at == len(self._rest):
            return False
        key = self._rest[len(mark) : end].strip()
        if self._rest[at] not in ":=" or not key:
            return self._fail()
        self._take(at + 1)
        self._value_schema = property_schema(self._open[-1].schema, key, self._root)
        self._begin_value(quoted(key) + ": ", out)
        return True

    def _value(self, out: list[Event]) -> bool:
        if not self._skip() or (self._quote.startswith(self._rest) and self._rest != self._quote):
            return False
        self._marked = ""
        if self._rest.startswith(self._quote):
            self._take(len(self._quote))
            # A text of a parameter that must not be one is typed at its end.
            self._streams = "string" in types(self._value_schema, self._root)
            if self._streams:
                self._emit('"', out)
            self._state = self._text
        elif self._rest[0] in "{[":
            return self._enter(out)
        elif self._rest[0] in _PLAIN:
            self._mark = self._take(1)
            self._held.append(self._mark)
            self._state = self._in_marks
        else:
            self._state = self._bare
        return True

    def _text(self, out: list[Event]) -> bool:
        """Within the format's quotation marks."""
        before, mark, _ = split_at(self._rest, (self._quote,))
        self._take(len(before) + len(mark))
        if self._streams:
            self._emit(quoted(before)[1:-1] + ('"' if mark else ""), out)
        else:
            self._held.append(before)
        if mark:
            self._end_value("" if self._streams else self._typed(), out)
        return bool(mark)

    def _in_marks(self, _: list[Event]) -> bool:
        """Within quotation marks of JSON or Python."""
        end = match_end(_PLAIN[self._mark], self._rest)
        self._held.append(self._take(end))
        if self._rest.startswith(self._mark):
            self._held.append(self._take(1))
            self._marked = "".join(self._held)
            self._state = self._bare
        elif len(self._rest) > 1:
            self._held.append(self._take(2))
        else:
            return False
        return True

    def _bare(self, out: list[Event]) -> bool:
        """Within a value up to the comma or bracket after it."""
        self._held.append(self._take(match_end(_BARE, self._rest)))
        if not self._rest:
            return False
        text = "".join(self._held).strip()
        is_marked = text and text == self._marked
        self._end_value(quoted(_unmarked(text)) if is_marked else self._typed(), out)
        return True

    def _typed(self) -> str:
        return as_json("".join(self._held).strip(), types(self._value_schema, self._root))

    def _end_value(self, rest: str, out: list[Event]) -> None:
        self._emit(rest, out)
        self._held.clear()
        self._state = self._after

    def _after(self, _: list[Event]) -> bool:
        """After a text or bare value."""
        if not self._skip():
            return False
        if self._rest[0] not in (",", self._open[-1].end):
            return self._fail()
        self._state = self._next
        return True

    def finish(self, out: list[Event]) -> None:
        """Handles the end of the text: an announced call stays as far as it came."""
        if self.announced:
            rest = self._take(len(self._rest))
            self._emit("".join(self._held) + (quoted(rest)[1:-1] if self._state == self._text else rest), out)
        super().finish(out)


def _unmarked(literal: str) -> str:
    """Returns the contents of a text as JSON or Python write it; those between the marks if neither would."""
    try:
        return str(json.loads(literal, strict=False) if literal[0] == '"' else ast.literal_eval(literal))
    except (ValueError, SyntaxError):
        return literal[1:-1]
