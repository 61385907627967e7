"""The base of the readers of a call, and the comparison of markers with text that is still arriving."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from gateway.parsers.events import CallArguments, CallCounter, CallRevoked, CallStart, Event, Text
from gateway.parsers.json_scan import skip_blanks
from gateway.parsers.values import Schema

# White space and numbers; between two tags, white space may stand as well.
_PARTS: Final = re.compile(r"\s+|(?<=>)(?=<)|\{[01]\}")
_BLANKS: Final = " \t\n\r"
_NAME: Final = re.compile(r"[\w.:/-]*")

# Longest name of a function; anything longer is not a call and need not be held back.
MAX_NAME: Final = 256


def match_end(pattern: re.Pattern[str], text: str, at: int = 0) -> int:
    """Returns the position after the characters of ``pattern``, a repetition of any length."""
    match = pattern.match(text, at)
    assert match is not None
    return match.end()


class Marker:
    """A text around calls: white space in it is optional, and ``{0}`` or ``{1}`` stands for any number."""

    def __init__(self, text: str) -> None:
        """Takes a text of a format; the white space around it does not count."""
        self.text = text.strip()
        # Constants; between two of them, blanks ("") or digits ("0").
        self._constants = _PARTS.split(self.text)
        self._between = ["0" if part.startswith("{") else "" for part in _PARTS.findall(self.text)]

    def __bool__(self) -> bool:
        return bool(self.text)

    @property
    def first(self) -> str:
        """The marker up to its first white space or number."""
        return self._constants[0]

    def match(self, text: str, at: int = 0) -> int | None:
        """Compares the marker with the text from ``at`` on.

        Returns:
            The position after the marker; -1 if the text is different; ``None`` if more text must decide.
        """
        for place, constant in enumerate(self._constants):
            if place:
                start, chars = at, "0123456789" if self._between[place - 1] else _BLANKS
                while at < len(text) and text[at] in chars:
                    at += 1
                if at == len(text):
                    return None
                if self._between[place - 1] and at == start:
                    return -1
            if not text.startswith(constant, at):
                return None if constant.startswith(text[at:]) else -1
            at += len(constant)
        return at


class CallContext(NamedTuple):
    """The place of a call in an answer."""

    counter: CallCounter
    tools: Mapping[str, Schema]
    """The schema of the arguments of each of the request's tools, by name."""
    is_marked: bool = True
    """Whether a marker announces the call; else only names of the request's tools are calls."""
    before: str = ""
    """Text of the call before its name or object; returned as content without a call."""
    ends: tuple[Marker, ...] = ()
    """Markers that may follow the call."""
    stop: Marker = Marker("")
    """The end of the call and of its section."""
    start: Marker = Marker("")
    """The beginning of another section and its call; empty where calls stand in no section."""


class CallReader:
    """Reads a call as it arrives. Subclasses are state machines over ``self._rest``.

    A state consumes text with :meth:`_take`, appends events, and returns whether it may continue; without, it
    waits for more text. It must decide the same however little it saw before.
    """

    done: bool
    """The call is complete."""
    failed: bool
    """The text is not a call; see :meth:`give_up`."""

    def __init__(self, context: CallContext, state: Callable[[list[Event]], bool]) -> None:
        """Waits for the call, in its first state."""
        self.done = False
        self.failed = False
        self._context = context
        self._rest = ""
        self._state = state
        self._source = [context.before]
        self._start: CallStart | None = None

    @property
    def announced(self) -> bool:
        """Whether the name has been emitted."""
        return self._start is not None

    def feed(self, text: str, out: list[Event]) -> str:
        """Reads on; returns the rest of the text if the call has ended or failed, else an empty string."""
        self._rest += text
        while self._rest and not self.done and not self.failed and self._state(out):
            pass
        if not self.done and not self.failed:
            return ""
        rest, self._rest = self._rest, ""
        return rest

    def give_up(self, out: list[Event]) -> None:
        """Emits the text of a failed call as content, or revokes the call if it was announced."""
        source = "".join(self._source)
        out.append(CallRevoked(self._start.number, source) if self._start else Text(source))

    def finish(self, out: list[Event]) -> None:
        """Handles the end of the text: an announced call stays, anything less becomes content."""
        if self._start is None:
            self._take(len(self._rest))
            self.give_up(out)

    def _take(self, count: int) -> str:
        """Consumes ``count`` characters."""
        taken, self._rest = self._rest[:count], self._rest[count:]
        self._source.append(taken)
        return taken

    def _fail(self) -> bool:
        self.failed = True
        return False

    def _skip(self) -> bool:
        """Consumes white space; returns whether other text is left."""
        self._take(skip_blanks(self._rest))
        return bool(self._rest)

    def _accept(self, name: str) -> bool:
        """Whether a function of that name may be called here."""
        return bool(name) and (self._context.is_marked or name in self._context.tools)

    def _schema(self, name: str) -> Schema:
        return self._context.tools.get(name)

    def _name_ahead(self) -> str:
        """Returns the name that the rest begins with; empty if more text must come, or after a failure."""
        end = match_end(_NAME, self._rest)
        if end == len(self._rest) and end <= MAX_NAME:
            return ""
        name = self._rest[:end]
        self.failed = end > MAX_NAME or not self._accept(name)
        return "" if self.failed else name

    def _announce(self, name: str, out: list[Event], given_id: str | None = None) -> None:
        self._start = self._context.counter.start(name, given_id)
        out.append(self._start)

    def _emit(self, fragment: str, out: list[Event]) -> None:
        """Emits a piece of the announced call's arguments."""
        assert self._start is not None
        if fragment:
            out.append(CallArguments(self._start.number, fragment))

    def _at(self, markers: Sequence[Marker], at: int = 0) -> tuple[Marker | None, int | None]:
        """Looks for the first of ``markers`` that the rest begins with, from ``at`` on.

        Returns:
            The marker and the position after it; without one, -1, or ``None`` if more text must decide.
        """
        undecided = False
        for marker in markers:
            end = marker.match(self._rest, at)
            if end is None:
                undecided = True
            elif end >= 0 and not undecided:
                return marker, end
        return None, None if undecided else -1
