"""Calls written as a name and parameters between tags, whose values are plain text."""

import re
from typing import Final

from gateway.parsers.call_reader import MAX_NAME, CallContext, CallReader, Marker
from gateway.parsers.events import Event
from gateway.parsers.formats import Tagged
from gateway.parsers.json_scan import is_value, skip_blanks
from gateway.parsers.parser_base import undecided
from gateway.parsers.values import Schema, as_json, property_schema, quoted, types

_TEXT: Final = frozenset({"string"})


class TaggedCall(CallReader):
    """Reads a call and writes its arguments as a JSON object. Texts are emitted as they arrive."""

    def __init__(self, form: Tagged, context: CallContext) -> None:
        """Waits for the call; see :class:`CallContext`."""
        super().__init__(context, self._name)
        self._form = form
        self._name_end, self._key_start = Marker(form.name_end), Marker(form.key)
        self._key_ends = [Marker(text) for text in (form.key_end, *form.json_key_ends)]
        self._value_end = Marker(form.value_end)
        self._starts = (context.start,) if context.start else ()
        self._marks = [mark for mark in (self._value_end.text, context.stop.first) if mark]
        self._candidates = re.compile("|".join(map(re.escape, self._marks)))
        self._longest = max(map(len, self._marks))
        self._called = ""
        self._root: Schema = None
        self._has_keys = False
        # Of the current value.
        self._allowed = _TEXT
        # Where the search for its end goes on, and where the blanks after a marker end.
        self._searched = self._blank = 0
        self._is_json = False
        self._text_begun = False

    def _name(self, _: list[Event]) -> bool:
        if not self._skip():
            return False
        if not (name := self._name_ahead()):
            return False
        end = len(name)
        if self._name_end:
            after = self._name_end.match(self._rest, end)
            if after is None:
                return False
            if after < 0:
                return self._fail()
            end = after
        self._called = name
        self._take(end)
        self._state = self._named
        return True

    def _named(self, out: list[Event]) -> bool:
        """After the name: a parameter or the end of the call must follow."""
        if not self._name_end:
            if not self._skip():
                return False
            end = self._at((self._key_start, *self._context.ends))[1]
            if end is None:
                return False
            if end < 0:
                return self._fail()
        self._root = self._schema(self._called)
        self._announce(self._called, out)
        self._emit("{", out)
        self._state = self._next
        return True

    def _next(self, out: list[Event]) -> bool:
        """Before a parameter, or the end of the call."""
        if not self._skip():
            return False
        marker, end = self._at((self._key_start, *self._context.ends))
        if end is None:
            return False
        if marker is None:
            return self._fail()
        if marker is self._key_start:
            self._take(end)
            self._state = self._key
            return True
        self._emit("}", out)
        self.done = True
        return False

    def _key(self, out: list[Event]) -> bool:
        at = self._rest.find(self._key_ends[0].text[0])
        marker, end = self._at(self._key_ends, at) if at >= 0 else (None, None)
        if end is None:
            return False if len(self._rest) <= MAX_NAME else self._fail()
        key = self._rest[:at].strip()
        if marker is None or not key:
            return self._fail()
        self._take(end)
        self._emit((", " if self._has_keys else "") + quoted(key) + ": ", out)
        self._has_keys, self._text_begun, self._searched, self._blank = True, False, 0, 0
        self._is_json = marker is not self._key_ends[0]
        if self._form.json_key_ends and not self._is_json:
            self._allowed = _TEXT
        else:
            self._allowed = types(property_schema(self._root, key, self._root), self._root)
        self._state = self._value_start
        return True

    def _value_start(self, _: list[Event]) -> bool:
        if self._form.key_end.endswith("\n") and self._rest[0] == "\n":
            self._take(1)
        self._state = self._value
        return True

    def _value(self, out: list[Event]) -> bool:
        """Reads a value up to the tag that ends it; the same tag before other text is part of the value."""
        while (found := self._candidates.search(self._rest, self._searched)) is not None:
            at = found.start()
            end = self._end_at(at)
            if end == -1:
                self._searched, self._blank = at + 1, 0
                continue
            if end is None:
                self._searched = at
                self._stream(at, out)
                return False
            self._end_value(at, out)
            return True
        # A part of a marker may be at the end.
        self._searched = max(self._searched, len(self._rest) - self._longest + 1)
        self._stream(self._searched, out)
        return False

    def _end_at(self, at: int) -> int | None:
        """Whether the value ends at a marker; -1: the marker is part of it, ``None``: more text must decide.

        A value without its tag ends with the call, where another section or the end of the text follows.
        """
        end, followers = self._value_end.match(self._rest, at), (self._key_start, *self._context.ends)
        if end == -1:
            end, followers = self._context.stop.match(self._rest, at), self._starts
        if end is None or end == -1:
            return end
        # Blanks are read once.
        self._blank = skip_blanks(self._rest, max(end, self._blank))
        return None if self._blank == len(self._rest) else self._at(followers, self._blank)[1]

    def _stream(self, end: int, out: list[Event]) -> None:
        """Emits text before ``end``, except a line break that may belong to the tag."""
        if end > 1 and self._allowed == _TEXT and not self._is_json:
            self._searched = max(0, self._searched - end + 1)
            self._blank = max(0, self._blank - end + 1)
            self._emit(self._open_text() + quoted(self._take(end - 1))[1:-1], out)

    def _open_text(self) -> str:
        """Returns the quotation mark before a text, once."""
        begun, self._text_begun = self._text_begun, True
        return "" if begun else '"'

    def _end_value(self, at: int, out: list[Event]) -> None:
        text = self._take(at)
        tag = self._value_end.match(self._rest)
        self._take(tag if tag and tag > 0 else 0)
        self._state = self._next
        if self._form.value_end.startswith("\n") and text.endswith("\n"):
            text = text[:-1]
        if self._text_begun:
            self._emit(quoted(text)[1:], out)
        elif self._is_json and is_value(text.strip()):
            self._emit(text.strip(), out)
        else:
            self._emit(as_json(text, self._allowed), out)

    def finish(self, out: list[Event]) -> None:
        """Handles the end of the text: a value without its end is shown as far as it came."""
        if self._state in (self._value, self._value_start):
            found = self._candidates.search(self._rest, self._searched)
            if found and self._end_at(found.start()) is None:
                self._end_value(found.start(), out)
            else:
                self._cut_value(out)
        if self._state == self._next:
            # Some models stop after the last parameter.
            self._emit("}", out)
        super().finish(out)

    def _cut_value(self, out: list[Event]) -> None:
        """Emits a value without its end, except a part of the tag."""
        part = max(undecided(self._rest, mark) for mark in self._marks)
        text = self._take(len(self._rest) - part)
        if self._form.value_end.startswith("\n"):
            text = text.removesuffix("\n")
        if self._allowed == _TEXT and not self._is_json:
            text = self._open_text() + quoted(text)[1:-1]
        self._emit(text, out)
