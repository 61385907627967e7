"""JSON lists of calls: ``[{"name": "get_weather", "parameters": {"city": "Paris"}}, …]``."""

from collections.abc import Callable

from gateway.parsers.events import Event
from gateway.parsers.json_call_parser import JsonCallParser
from gateway.parsers.parser_base import State


class JsonListParser(JsonCallParser):
    """Reads lists of calls; subclasses find where a list begins."""

    def __init__(self, new_id: Callable[[], str], state: State, *, text: State) -> None:
        """Waits for a list; ``text`` is the state after it."""
        super().__init__(new_id, state, text=text, behind=self._behind_item)
        self._behind_list = text

    def _behind_item(self, _: list[Event]) -> bool:
        if not self._skip():
            return False
        match self._rest[0]:
            case ",":
                self._pass(1)
                self._open(self._passed())
            case "]":
                self._passed()
                self._rest, self._state = self._rest[1:], self._behind_list
            case _:
                self._back()
                self._state = self._behind_list
        return True


class PlainListParser(JsonListParser):
    """Reads a list that is the whole answer; implements :class:`gateway.parsers.events.ToolParser`."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        super().__init__(new_id, self._begin, text=self._content)

    def _begin(self, _: list[Event]) -> bool:
        if not self._skip():
            return False
        if self._rest[0] == "[":
            self._pass(1)
            self._open(self._passed())
        else:
            self._back()
            self._state = self._content
        return True
