"""What the parsers have in common whose formats write a call as one JSON object."""

from collections.abc import Callable, Collection
from typing import Final

from gateway.parsers.events import Counter, Event, Text
from gateway.parsers.json_call import JsonCall
from gateway.parsers.parser_base import ParserBase, State

ARGUMENTS: Final = ("arguments", "parameters")


class JsonCallParser(ParserBase):
    """Reads calls; its subclasses find where they begin.

    A call that fails before it was announced is content, and others may follow it. One that was announced is revoked: a client that
    has seen it can be told no more than that everything from there on is content.
    """

    def __init__(
        self, new_id: Callable[[], str], state: State, *, text: State, behind: State, end: str = ""
    ) -> None:
        """Waits for a call.

        Args:
            new_id: makes ids of calls.
            state: the first state.
            text: the state behind what turned out to be no call.
            behind: the one behind a call; what it has put aside when the text ends only separated.
            end: the marker that may close a call; a part of it that the text ends with is no content.
        """
        super().__init__(state)
        self._counter = Counter(new_id)
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
        """A call begins here, behind ``before``; see :class:`JsonCall`."""
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
        """Nothing is looked for any more."""
        out.append(Text(self._rest))
        self._rest = ""
        return False

    def _end(self, out: list[Event]) -> None:
        if self._call is not None:
            self._call.finish(out)
        elif self._state != self._states[1] or not self._end_marker.startswith(self._rest):
            super()._end(out)
