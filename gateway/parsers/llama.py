"""The JSON format of Llama 3.

::

    {"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}
    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}

Source: Meta's model cards and prompt formats for Llama 3.1 to 3.3. After ``<|python_tag|>``, any name is a
call. Without the marker, an object is a call only at the beginning of the answer, without other members, and
with the name of a tool of the request: an answer may be JSON, too.
"""

from collections.abc import Callable, Collection
from typing import Final

from gateway.parsers.events import Event, Text
from gateway.parsers.json_call import JsonCallParser
from gateway.parsers.parser_base import split_at

TAG: Final = "<|python_tag|>"


class LlamaParser(JsonCallParser):
    """Implements :class:`gateway.parsers.events.ToolParser`."""

    def __init__(self, new_id: Callable[[], str], names: Collection[str]) -> None:
        """Reads calls of the tools ``names``."""
        super().__init__(new_id, self._begin, text=self._text, after=self._behind)
        self._names = names
        self._separated = False

    def _begin(self, _: list[Event]) -> bool:
        """The state at the beginning and after each call. An unmarked object is a call only here."""
        if not self._skip() or (TAG.startswith(self._rest) and self._rest != TAG):
            return False
        # A separator is content unless a call follows.
        if self._rest.startswith("{"):
            self._open_object(self._passed(), self._names.__contains__)
        elif self._rest.startswith(TAG):
            self._pass(len(TAG))
            self._open_object(self._passed(), bool)
        else:
            self._back()
            self._state = self._text
        return True

    def _behind(self, out: list[Event]) -> bool:
        if not self._separated and self._skip() and self._rest[0] in ";,":
            self._pass(1)
            self._separated = True
        return self._begin(out)

    def _text(self, out: list[Event]) -> bool:
        before, marker, self._rest = split_at(self._rest, (TAG,))
        out.append(Text(before))
        if marker:
            self._open_object(TAG, bool)
        return bool(marker)

    def _open_object(self, before: str, accept: Callable[[str], bool]) -> None:
        self._separated = False
        self._open(before, others=("type",), accept=accept)
