"""Calls written as JSON objects."""

import json
from collections.abc import Callable
from typing import Final

from gateway.parsers.call_reader import CallContext, CallReader
from gateway.parsers.events import CallArguments, Event
from gateway.parsers.formats import JsonObject
from gateway.parsers.json_scan import ValueScanner, is_object, skip_blanks

# Longest member key or function name; anything longer is not a call and need not be held back.
_MAX_NAME: Final = 512


class JsonCall(CallReader):
    """Reads a call. Its arguments are emitted exactly as written.

    Members may come in any order; arguments before the name are held back until the name is known. Some
    models write the arguments as a string with the object inside, whose contents are then emitted at once.
    Without arguments, if a known tool is named, or with ``null``, they are empty.
    """

    def __init__(self, form: JsonObject, context: CallContext) -> None:
        """Waits for the call; see :class:`CallContext`."""
        super().__init__(context, lambda _: False)
        self._form = form
        self._step: Callable[[str, int, list[Event]], int] = self._open
        self._scanner = ValueScanner()
        self._key = ""
        # Text of the current key or name.
        self._text = ""
        self._name = ""
        self._held: list[str] = []
        # Pieces of arguments that are written as a string, or as null.
        self._quoted: list[str] = []
        self._has_arguments = False

    def feed(self, text: str, out: list[Event]) -> str:
        """Reads on; returns the rest of ``text`` if the object has ended or failed, else an empty string."""
        at = 0
        while at < len(text) and not self.done and not self.failed:
            at = self._step(text, at, out)
        self._source.append(text[:at])
        return text[at:]

    def _open(self, text: str, at: int, _: list[Event]) -> int:
        at = skip_blanks(text, at)
        if at < len(text):
            self.failed = text[at] != "{"
            self._step = self._next_key
            at += not self.failed
        return at

    def _next_key(self, text: str, at: int, _: list[Event]) -> int:
        at = skip_blanks(text, at)
        if at < len(text):
            self.failed = text[at] != '"'
            self._scanner, self._text, self._step = ValueScanner(), "", self._in_key
        return at

    def _in_key(self, text: str, at: int, _: list[Event]) -> int:
        end = self._scanner.feed(text, at)
        self._text += text[at:end]
        self.failed = self._scanner.failed or len(self._text) > _MAX_NAME
        if self._scanner.done and not self.failed:
            self._key = json.loads(self._text)
            self.failed = not self._expected(self._key)
            self._step = self._colon
        return end

    @property
    def _has_tool(self) -> bool:
        """Whether the name, after a marker, is a tool's; its arguments may be missing."""
        return self._context.is_marked and self._name in self._context.tools

    def _expected(self, key: str) -> bool:
        if key == self._form.name:
            return not self._name
        if key in self._form.arguments:
            return not self._has_arguments
        return self._context.is_marked or key == "type"

    def _colon(self, text: str, at: int, _: list[Event]) -> int:
        at = skip_blanks(text, at)
        if at < len(text):
            self.failed = text[at] != ":"
            self._step = self._before_value
            at += not self.failed
        return at

    def _before_value(self, text: str, at: int, out: list[Event]) -> int:
        at = skip_blanks(text, at)
        if at == len(text):
            return at
        self._scanner, self._text = ValueScanner(), ""
        if self._key == self._form.name:
            self.failed, self._step = text[at] != '"', self._in_name
        elif self._key in self._form.arguments:
            if text[at] in '"n':
                self._quoted, self._step = [], self._in_quoted
                return at
            self.failed, self._step = text[at] != "{", self._in_arguments
            if not self.failed:
                self._has_arguments = True
                self._begin(out)
        else:
            self._step = self._in_other
        return at

    def _in_name(self, text: str, at: int, out: list[Event]) -> int:
        end = self._scanner.feed(text, at)
        self._text += text[at:end]
        self.failed = self._scanner.failed or len(self._text) > _MAX_NAME
        if self._scanner.done and not self.failed:
            self._name = json.loads(self._text)
            # Unprintable includes halves of surrogate pairs, which UTF-8 cannot encode.
            self.failed = not (self._name and self._name.isprintable() and self._accept(self._name))
            if not self.failed and self._has_arguments:
                self._begin(out)
            self._step = self._after
        return end

    def _begin(self, out: list[Event]) -> None:
        """Announces the call once its name and the beginning of its arguments are known."""
        if self._name:
            self._announce(self._name, out)
            self._emit("".join(self._held), out)

    def _in_arguments(self, text: str, at: int, out: list[Event]) -> int:
        end = self._scanner.feed(text, at)
        if self._start is None:
            self._held.append(text[at:end])
        elif end > at:
            out.append(CallArguments(self._start.number, text[at:end]))
        self._end_value()
        return end

    def _in_quoted(self, text: str, at: int, out: list[Event]) -> int:
        """Reads arguments written as ``null``, or as a string that contains JSON.

        They are emitted whole: only the end shows whether they are an object.
        """
        end = self._scanner.feed(text, at)
        self._quoted.append(text[at:end])
        self._end_value()
        if self._scanner.done and not self.failed:
            written = json.loads("".join(self._quoted))
            arguments = "{}" if written is None else written
            self.failed = not is_object(arguments)
            if not self.failed:
                self._has_arguments = True
                self._held = [arguments]
                self._begin(out)
        return end

    def _in_other(self, text: str, at: int, _: list[Event]) -> int:
        end = self._scanner.feed(text, at)
        self._end_value()
        return end

    def _end_value(self) -> None:
        self.failed = self._scanner.failed
        if self._scanner.done:
            self._step = self._after

    def _after(self, text: str, at: int, out: list[Event]) -> int:
        at = skip_blanks(text, at)
        if at == len(text):
            return at
        if text[at] == ",":
            self._step = self._next_key
        elif text[at] == "}" and (self._start or (self._has_tool and not self._has_arguments)):
            if self._start is None:
                self._held = ["{}"]
                self._begin(out)
            self.done = True
        else:
            self.failed = True
            return at
        return at + 1
