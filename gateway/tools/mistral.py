"""Mistral's formats, and JSON lists of calls.

::

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, …]          tokenizers v2 to v7
    [TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]…                              v11
    [TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}[TOOL_CALLS]…      v13

Source: mistral-common's instruct tokenizers. One parser reads all of them; ``ListParser`` reads the bare list of ``name`` and
``parameters`` that models without a format of their own are held to.
"""

import re
from collections.abc import Callable
from typing import Final

from gateway.tools.events import CallArguments, CallRevoked, CallStart, Counter, Event, Text
from gateway.tools.json_call import JsonCall
from gateway.tools.json_scan import ValueScanner, skip_blanks
from gateway.tools.machine import Machine, split_at

MARKER: Final = "[TOOL_CALLS]"
ARGS: Final = "[ARGS]"
CALL_ID: Final = "[CALL_ID]"

_HEADER: Final = re.compile(r"\s*([\w.:/-]{1,128})(?:\[CALL_ID\](\w{1,64}))?(?:\[ARGS\])?\s*")

# Within that many characters behind the marker the arguments must begin.
_MAX_HEADER: Final = 256


class _Lists(Machine):
    """Reads ``[{…}, {…}]``."""

    def __init__(self, new_id: Callable[[], str], state: Callable[[list[Event]], bool]) -> None:
        super().__init__(state)
        self._counter = Counter(new_id)
        self._call: JsonCall | None = None

    def _open_item(self, before: str) -> None:
        self._call = JsonCall(self._counter, arguments=("arguments", "parameters"), before=before)
        self._state = self._in_item

    def _in_item(self, out: list[Event]) -> bool:
        assert self._call is not None
        self._rest = self._call.feed(self._rest, out)
        if self._call.failed:
            self._call.give_up(out)
        if self._call.failed or self._call.done:
            self._state = self._text if self._call.failed else self._behind_item
            self._call = None
        return True

    def _behind_item(self, _: list[Event]) -> bool:
        at = skip_blanks(self._rest)
        match self._rest[at : at + 1]:
            case "":
                return False
            case ",":
                before, self._rest = self._rest[: at + 1], self._rest[at + 1 :]
                self._open_item(before)
            case "]":
                self._rest, self._state = self._rest[at + 1 :], self._text
            case _:
                self._state = self._text
        return True

    def _text(self, out: list[Event]) -> bool:
        raise NotImplementedError

    def _end(self, out: list[Event]) -> None:
        if self._call is not None:
            self._call.finish(out, self._rest)
        elif self._state != self._behind_item:
            super()._end(out)


class ListParser(_Lists):
    """A list that is the whole answer. See :class:`gateway.tools.events.ToolParser`."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        super().__init__(new_id, self._open)

    def _open(self, _: list[Event]) -> bool:
        at = skip_blanks(self._rest)
        if at == len(self._rest):
            return False
        if self._rest[at] == "[":
            before, self._rest = self._rest[: at + 1], self._rest[at + 1 :]
            self._open_item(before)
        else:
            self._state = self._text
        return True

    def _text(self, out: list[Event]) -> bool:
        out.append(Text(self._rest))
        self._rest = ""
        return False


class MistralParser(_Lists):
    """See :class:`gateway.tools.events.ToolParser`."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        super().__init__(new_id, self._text)
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
        at = skip_blanks(self._rest)
        if at == len(self._rest):
            return False
        if self._rest[at] == "[":
            before, self._rest = MARKER + self._rest[: at + 1], self._rest[at + 1 :]
            self._open_item(before)
        else:
            self._state = self._header
        return True

    def _header(self, out: list[Event]) -> bool:
        at = self._rest.find("{", 0, _MAX_HEADER)
        if at < 0 and len(self._rest) < _MAX_HEADER:
            return False
        match = _HEADER.fullmatch(self._rest, 0, at) if at >= 0 else None
        if match is None:
            out.append(Text(MARKER))
            self._state = self._text
            return True
        self._start = self._counter.start(match[1], match[2])
        out.append(self._start)
        self._source, self._scanner = [MARKER, self._rest[:at]], ValueScanner()
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
        if self._scanner.failed or self._scanner.done:
            self._state = self._text
        return True

    def _end(self, out: list[Event]) -> None:
        if self._state in (self._behind_marker, self._header):
            out.append(Text(MARKER))
        super()._end(out)
