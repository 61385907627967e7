"""The format of Hermes and Qwen.

::

    Let me look.
    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Sources: Nous Research's Hermes-Function-Calling (prompt format) and the chat templates of Qwen 2.5 and Qwen
3. The end marker may be missing: some models stop right after the object.
"""

from collections.abc import Callable
from typing import Final

from gateway.parsers.events import Event, Text
from gateway.parsers.json_call import JsonCallParser
from gateway.parsers.parser_base import split_at

START: Final = "<tool_call>"
END: Final = "</tool_call>"


class HermesParser(JsonCallParser):
    """Implements :class:`gateway.parsers.events.ToolParser`."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        super().__init__(new_id, self._text, text=self._text, after=self._behind, end=END)

    def _text(self, out: list[Event]) -> bool:
        before, marker, self._rest = split_at(self._rest, (START,))
        out.append(Text(before))
        if marker:
            self._open(START, arguments=("arguments",))
        return bool(marker)

    def _behind(self, _: list[Event]) -> bool:
        return self._close(END, self._text)
