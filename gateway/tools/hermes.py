"""Hermes' and Qwen's format.

::

    Let me look.
    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Sources: Nous Research's Hermes-Function-Calling (prompt format) and the chat templates of Qwen 2.5 and Qwen 3. A missing end marker is
forgiven, as models that stop right behind the object leave it out.
"""

from collections.abc import Callable
from typing import Final

from gateway.tools.events import Counter, Event, Text
from gateway.tools.json_call import JsonCall
from gateway.tools.json_scan import skip_blanks
from gateway.tools.machine import Machine, split_at

START: Final = "<tool_call>"
END: Final = "</tool_call>"


class HermesParser(Machine):
    """See :class:`gateway.tools.events.ToolParser`."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        super().__init__(self._text)
        self._counter = Counter(new_id)
        self._call: JsonCall | None = None

    def _text(self, out: list[Event]) -> bool:
        before, marker, self._rest = split_at(self._rest, (START,))
        out.append(Text(before))
        if marker:
            self._call = JsonCall(self._counter, arguments=("arguments",), before=START)
            self._state = self._in_call
        return bool(marker)

    def _in_call(self, out: list[Event]) -> bool:
        assert self._call is not None
        self._rest = self._call.feed(self._rest, out)
        if self._call.failed:
            self._call.give_up(out)
        if self._call.failed or self._call.done:
            self._state = self._text if self._call.failed else self._behind
            self._call = None
        return True

    def _behind(self, _: list[Event]) -> bool:
        tail = self._rest[skip_blanks(self._rest) :]
        if tail.startswith(END):
            self._rest = tail[len(END) :]
        elif END.startswith(tail):
            return False
        self._state = self._text
        return True

    def _end(self, out: list[Event]) -> None:
        if self._call is not None:
            self._call.finish(out, self._rest)
        elif self._state == self._text:
            super()._end(out)
