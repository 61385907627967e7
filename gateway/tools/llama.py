"""Llama 3's JSON format.

::

    {"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}
    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}

Source: Meta's model cards and prompt formats for Llama 3.1 to 3.3. Behind ``<|python_tag|>`` any name is a call. Without that marker, an
object is a call only where the answer begins with it, has no other members and names a tool of the request: JSON may be an answer, too.
"""

from collections.abc import Callable, Collection
from typing import Final

from gateway.tools.events import Counter, Event, Text
from gateway.tools.json_call import JsonCall
from gateway.tools.json_scan import skip_blanks
from gateway.tools.machine import Machine, split_at

TAG: Final = "<|python_tag|>"


class LlamaParser(Machine):
    """See :class:`gateway.tools.events.ToolParser`."""

    def __init__(self, new_id: Callable[[], str], names: Collection[str]) -> None:
        """Reads calls of the tools ``names``."""
        super().__init__(self._begin)
        self._counter = Counter(new_id)
        self._names = names
        self._call: JsonCall | None = None

    def _begin(self, _: list[Event]) -> bool:
        """At the answer's beginning, and behind each call: only here an object without marker may be a call."""
        at = skip_blanks(self._rest)
        if self._counter.count and self._rest[at : at + 1] == ";":
            at = skip_blanks(self._rest, at + 1)
        ahead = self._rest[at:]
        if not ahead or (TAG.startswith(ahead) and ahead != TAG):
            return False
        if ahead.startswith("{"):
            self._open(self._rest[:at], ahead, self._names.__contains__)
        else:
            # The separator is content unless a call follows.
            if ahead.startswith(TAG):
                self._rest = ahead
            self._state = self._text
        return True

    def _text(self, out: list[Event]) -> bool:
        before, marker, self._rest = split_at(self._rest, (TAG,))
        out.append(Text(before))
        if marker:
            self._open(TAG, self._rest, bool)
        return bool(marker)

    def _open(self, before: str, rest: str, accept: Callable[[str], bool]) -> None:
        self._call = JsonCall(
            self._counter,
            arguments=("parameters", "arguments"),
            others=("type",),
            accept=accept,
            before=before,
        )
        self._rest, self._state = rest, self._in_call

    def _in_call(self, out: list[Event]) -> bool:
        assert self._call is not None
        self._rest = self._call.feed(self._rest, out)
        if self._call.failed:
            self._call.give_up(out)
        if self._call.failed or self._call.done:
            self._state = self._text if self._call.failed else self._begin
            self._call = None
        return True

    def _end(self, out: list[Event]) -> None:
        if self._call is not None:
            self._call.finish(out, self._rest)
        elif self._state != self._begin or not self._counter.count:
            super()._end(out)
