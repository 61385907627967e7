"""The base of all parsers: a state machine over text that arrives in pieces, and the search for markers."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from gateway.parsers.events import CallArguments, CallCounter, CallStart, Event, Text
from gateway.parsers.json_scan import skip_blanks


def split_at(text: str, markers: Sequence[str]) -> tuple[str, str, str]:
    """Looks for the first of ``markers`` in ``text``.

    Returns:
        The text before the marker, the marker, and the text after it. Without a marker: the text certainly
        before any marker, nothing, and the tail that may become a marker.
    """
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    if found:
        at, marker = min(found)
        return text[:at], marker, text[at + len(marker) :]
    keep = max(undecided(text, marker) for marker in markers)
    return text[: len(text) - keep], "", text[len(text) - keep :]


def undecided(text: str, marker: str) -> int:
    """Returns the length of the longest tail of ``text`` that begins ``marker`` without completing it."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0 and not marker.startswith(text[at:]):
        at = text.find(marker[0], at + 1)
    return len(text) - at if at >= 0 else 0


State: TypeAlias = Callable[[list[Event]], bool]


class ParserBase:
    """A parser as a state machine.

    A state is a method. It consumes text from the front of ``self._rest``, appends events, and returns
    whether the machine may continue with the new state. The machine presents the remainder again with more
    text, so a state must decide the same however little it saw before. The remainder must be short, as it is
    read again; long runs of white space are set aside.
    """

    def __init__(self, state: State) -> None:
        self._rest = ""
        self._state = state
        # White space and other text that was set aside before the rest. Whether it is content turns out
        # later.
        self._aside: list[str] = []

    def feed(self, text: str) -> list[Event]:
        """See :meth:`gateway.parsers.events.ToolParser.feed`."""
        out: list[Event] = []
        self._rest += text
        while self._rest and self._state(out):
            pass
        return out

    def finish(self) -> list[Event]:
        """See :meth:`gateway.parsers.events.ToolParser.finish`."""
        out: list[Event] = []
        self._end(out)
        self._rest = ""
        return out

    def whole(self, text: str) -> list[Event]:
        """See :meth:`gateway.parsers.events.ToolParser.whole`."""
        return self.feed(text) + self.finish()

    def _skip(self) -> bool:
        """Sets white space aside; returns whether other text is left."""
        self._pass(skip_blanks(self._rest))
        return bool(self._rest)

    def _pass(self, count: int) -> None:
        """Sets ``count`` characters aside."""
        if count:
            self._aside.append(self._rest[:count])
            self._rest = self._rest[count:]

    def _passed(self) -> str:
        """Returns the text set aside, and forgets it."""
        passed = "".join(self._aside)
        self._aside.clear()
        return passed

    def _back(self) -> None:
        """Puts the text set aside back in front of the rest."""
        self._rest = self._passed() + self._rest

    def _end(self, out: list[Event]) -> None:
        """Handles the end of the text; by default, the text held back becomes content."""
        self._back()
        if self._rest:
            out.append(Text(self._rest))


class NamedToolParser:
    """Implements :class:`gateway.parsers.events.ToolParser`: all text is arguments."""

    def __init__(self, new_id: Callable[[], str], name: str) -> None:
        self._counter = CallCounter(new_id)
        self._name = name
        self._start: CallStart | None = None

    def feed(self, text: str) -> list[Event]:
        """Returns ``text`` as arguments."""
        if self._start is not None:
            return [CallArguments(self._start.number, text)] if text else []
        text = text.lstrip()
        if not text:
            return []
        self._start = self._counter.start(self._name)
        return [self._start, CallArguments(self._start.number, text)]

    def finish(self) -> list[Event]:
        """Returns nothing: no text is held back."""
        return []

    def whole(self, text: str) -> list[Event]:
        """See :meth:`gateway.parsers.events.ToolParser.whole`."""
        return self.feed(text)
