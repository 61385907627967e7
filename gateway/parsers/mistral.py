"""The formats of Mistral.

::

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, …]          tokenizers v2 to v7
    [TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]…                              v11
    [TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}[TOOL_CALLS]…      v13

Source: mistral-common's instruct tokenizers. The same parser reads all of them.
"""

import re
from collections.abc import Callable
from typing import Final

from gateway.parsers.events import CallArguments, CallRevoked, CallStart, Event, Text
from gateway.parsers.json_call import JsonListParser
from gateway.parsers.json_scan import ValueScanner
from gateway.parsers.parser_base import split_at

MARKER: Final = "[TOOL_CALLS]"
ARGS: Final = "[ARGS]"
CALL_ID: Final = "[CALL_ID]"

_HEADER: Final = re.compile(r"\s*([\w.:/-]{1,128})(?:\[CALL_ID\](\w{1,64}))?(?:\[ARGS\])?\s*")

# The arguments must begin within this many characters of the marker.
_MAX_HEADER: Final = 256


class MistralParser(JsonListParser):
    """Implements :class:`gateway.parsers.events.ToolParser`."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        super().__init__(new_id, self._text, text=self._text)
        self._start: CallStart | None = None
        self._scanner = ValueScanner()
        self._source: list[str] = []

    def _text(self, out: list[Event]) -> bool:
        before, marker, self._rest = split_at(self._rest, (MARKER,))
        out.append(Text(before))
        if marker:
            self._state = self._behind_marker
        return bool(marker)

    def _behind_marker(self, _: list[Event]) -> bool:
        if not self._skip():
            return False
        if self._rest[0] == "[":
            self._pass(1)
            self._open(MARKER + self._passed())
        else:
            self._state = self._header
        return True

    def _header(self, out: list[Event]) -> bool:
        at = self._rest.find("{", 0, _MAX_HEADER)
        if at < 0 and len(self._rest) < _MAX_HEADER:
            return False
        match = _HEADER.fullmatch(self._rest, 0, at) if at >= 0 else None
        if match is None:
            out.append(Text(MARKER + self._passed()))
            self._state = self._text
            return True
        self._start = self._counter.start(match[1], match[2])
        out.append(self._start)
        self._source, self._scanner = [MARKER, self._passed(), self._rest[:at]], ValueScanner()
        self._rest, self._state = self._rest[at:], self._arguments
        return True

    def _arguments(self, out: list[Event]) -> bool:
        assert self._start is not None
        at = self._scanner.feed(self._rest)
        taken, self._rest = self._rest[:at], self._rest[at:]
        self._source.append(taken)
        if taken:
            out.append(CallArguments(self._start.number, taken))
        if self._scanner.failed:
            out.append(CallRevoked(self._start.number, "".join(self._source)))
            self._state = self._content
        elif self._scanner.done:
            self._state = self._text
        return True

    def _end(self, out: list[Event]) -> None:
        if self._state in (self._behind_marker, self._header):
            out.append(Text(MARKER))
        super()._end(out)
