"""Calls written as a name and a JSON object."""

import re
from typing import Final

from gateway.parsers.call_reader import MAX_NAME, CallContext, CallReader, Marker, match_end
from gateway.parsers.events import Event
from gateway.parsers.formats import NamedJson
from gateway.parsers.json_scan import ValueScanner

_NAME: Final = re.compile(r"[\w./-]*")
_ID: Final = re.compile(r"\w*")


class NamedCall(CallReader):
    """Reads a call. Its arguments are emitted exactly as written; without any they are empty."""

    def __init__(self, form: NamedJson, context: CallContext) -> None:
        """Waits for the call; see :class:`CallContext`."""
        super().__init__(context, self._name)
        self._form = form
        self._id_mark, self._between = Marker(form.id_mark), Marker(form.between)
        self._called = ""
        self._id: str | None = None
        self._has_between = False
        self._scanner = ValueScanner()

    def _name(self, _: list[Event]) -> bool:
        if not self._skip():
            return False
        end = match_end(_NAME, self._rest)
        if end == len(self._rest) and end <= MAX_NAME:
            return False
        self._called = self._rest[:end].removeprefix(self._form.prefix)
        if not self._called or not 0 < end <= MAX_NAME or not self._accept(self._called):
            return self._fail()
        self._take(end)
        self._state = self._mark
        return True

    def _mark(self, _: list[Event]) -> bool:
        """After the name: an id may follow."""
        end = self._id_mark.match(self._rest) if self._id_mark else -1
        if end is None:
            return False
        if end > 0:
            self._take(end)
        self._state = self._in_id if end > 0 else self._middle
        return True

    def _in_id(self, _: list[Event]) -> bool:
        end = match_end(_ID, self._rest)
        if end == len(self._rest) and end <= MAX_NAME:
            return False
        if not 0 < end <= MAX_NAME:
            return self._fail()
        given = self._take(end)
        is_number = self._form.id_is_number
        self._id = f"{self._form.prefix}{self._called}{self._form.id_mark}{given}" if is_number else given
        self._state = self._middle
        return True

    def _middle(self, out: list[Event]) -> bool:
        """Before the arguments, or the end of a call without any."""
        if not self._skip():
            return False
        if not self._has_between:
            end = self._between.match(self._rest) if self._between else -1
            if end is None:
                return False
            if end > 0:
                self._has_between = True
                self._take(end)
                return True
        if self._rest[0] == "{":
            self._announce(self._called, out, self._id)
            self._state = self._arguments
            return True
        _, end = self._at(self._context.ends)
        if end == -1:
            return self._fail()
        if end is not None:
            self._call_nothing(out)
        return False

    def _call_nothing(self, out: list[Event]) -> None:
        self._announce(self._called, out, self._id)
        self._emit("{}", out)
        self.done = True

    def _arguments(self, out: list[Event]) -> bool:
        end = self._scanner.feed(self._rest)
        self._emit(self._take(end), out)
        self.done, self.failed = self._scanner.done, self._scanner.failed
        return False

    def finish(self, out: list[Event]) -> None:
        """Handles the end of the text: a name that announces arguments is a call without any."""
        if self._state == self._middle and self._has_between and not self._rest:
            self._call_nothing(out)
        super().finish(out)
