"""What the parsers of all formats share: text that arrives in pieces, and markers in it."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from gateway.parsers.events import Event, Text
from gateway.parsers.json_scan import skip_blanks


def split_at(text: str, markers: Sequence[str]) -> tuple[str, str, str]:
    """Looks for the first of ``markers``.

    Returns:
        The text in front of it, the marker and what follows; without one: the text that is certainly in front of any marker,
        nothing, and the end of the text that may still become one.
    """
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    if found:
        at, marker = min(found)
        return text[:at], marker, text[at + len(marker) :]
    keep = max(undecided(text, marker) for marker in markers)
    return text[: len(text) - keep], "", text[len(text) - keep :]


def undecided(text: str, marker: str) -> int:
    """Length of the longest tail of ``text`` that begins ``marker`` without completing it."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


State: TypeAlias = Callable[[list[Event]], bool]


class ParserBase:
    """A parser as a state machine.

    A state is a method: it takes from the front of ``self._rest`` what it can, appends events, and returns whether the state that is
    then set may go on. What it leaves there comes again, with more behind it: a state must decide the same, however little it saw before.
    What it leaves must be short, as it is looked at again; long runs of white space are put aside.
    """

    def __init__(self, state: State) -> None:
        self._rest = ""
        self._state = state
        # White space, and what else was passed, in front of the rest; whether it is content turns out later.
        self._aside: list[str] = []

    def feed(self, text: str) -> list[Event]:
        """See :class:`gateway.parsers.events.ToolParser`."""
        out: list[Event] = []
        self._rest += text
        while self._rest and self._state(out):
            pass
        return out

    def finish(self) -> list[Event]:
        """See :class:`gateway.parsers.events.ToolParser`."""
        out: list[Event] = []
        self._end(out)
        self._rest = ""
        return out

    def whole(self, text: str) -> list[Event]:
        """See :class:`gateway.parsers.events.ToolParser`."""
        return self.feed(text) + self.finish()

    def _skip(self) -> bool:
        """Puts white space aside; whether something is left."""
        self._pass(skip_blanks(self._rest))
        return bool(self._rest)

    def _pass(self, count: int) -> None:
        """Puts that many letters aside."""
        if count:
            self._aside.append(self._rest[:count])
            self._rest = self._rest[count:]

    def _passed(self) -> str:
        """What was put aside, which now belongs to whoever asks."""
        passed = "".join(self._aside)
        self._aside.clear()
        return passed

    def _back(self) -> None:
        """Puts it back in front of the rest."""
        self._rest = self._passed() + self._rest

    def _close(self, marker: str, then: State) -> bool:
        """A state that leaves out an end marker and the white space in front of it, if they are there, before ``then``."""
        if not self._skip() or (marker.startswith(self._rest) and self._rest != marker):
            return False
        if self._rest.startswith(marker):
            self._passed()
            self._rest = self._rest[len(marker) :]
        self._back()
        self._state = then
        return True

    def _end(self, out: list[Event]) -> None:
        """The text has ended in this state; the default gives back what was held."""
        self._back()
        if self._rest:
            out.append(Text(self._rest))
