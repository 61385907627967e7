"""The common base of parsers for formats whose calls are JSON objects."""

from collections.abc import Callable, Collection
from typing import Final

from gateway.parsers.events import CallCounter, Event, Text
from gateway.parsers.json_call import JsonCall
from gateway.parsers.parser_base import ParserBase, State

ARGUMENTS: Final = ("arguments", "parameters")


class JsonCallParser(ParserBase):
    """Reads calls; subclasses find where they begin.

    A call that fails before its announcement is content, and other calls may follow. A call that fails later
    is revoked, and everything after it is content: a client cannot be corrected.
    """

    def __init__(
        self, new_id: Callable[[], str], state: State, *, text: State, behind: State, end: str = ""
    ) -> None:
        """Waits for a call.

        Args:
            new_id: makes ids of calls.
            state: the first state.
            text: the state after text that turned out not to be a call.
            behind: the state after a call. Text set aside at the end was only a separator.
            end: the marker that may close a call; a part of it at the end of the text is not content.
        """
        super().__init__(state)
        self._counter = CallCounter(new_id)
        self._call: JsonCall | None = None
        self._states = (text, behind)
        self._end_marker = end

    def _open(
        self,
        before: str,
        *,
        arguments: Collection[str] = ARGUMENTS,
        others: Collection[str] | None = None,
        accept: Callable[[str], bool] = bool,
    ) -> None:
        """Begins a call after ``before``; see :class:`JsonCall` for the arguments."""
        self._call = JsonCall(self._counter, arguments=arguments, others=others, accept=accept, before=before)
        self._state = self._in_call

    def _in_call(self, out: list[Event]) -> bool:
        call = self._call
        assert call is not None
        self._rest = call.feed(self._rest, out)
        if not call.failed and not call.done:
            return False
        text, behind = self._states
        if call.failed:
            call.give_up(out)
            behind = self._content if call.announced else text
        self._call, self._state = None, behind
        return True

    def _content(self, out: list[Event]) -> bool:
        """The last state: all further text is content."""
        out.append(Text(self._rest))
        self._rest = ""
        return False

    def _end(self, out: list[Event]) -> None:
        if self._call is not None:
            self._call.finish(out)
        elif self._state != self._states[1] or not self._end_marker.startswith(self._rest):
            super()._end(out)
