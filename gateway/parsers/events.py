"""Events that parsers find in an answer, and the interface of all parsers."""

import secrets
import string
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias


class Text(NamedTuple):
    """A piece of content."""

    text: str


class Reasoning(NamedTuple):
    """A piece of the model's thinking."""

    text: str


class CallStart(NamedTuple):
    """The beginning of a call: its name is known, its arguments follow."""

    number: int
    """0-based among the answer's calls."""
    id: str
    name: str


class CallArguments(NamedTuple):
    """A further piece of a call's arguments, which are the text of a JSON object."""

    number: int
    fragment: str


class CallRevoked(NamedTuple):
    """Withdraws a call whose arguments turned out not to be JSON.

    A stream cannot take back sent text. A collected answer shows ``source`` as content instead of the call.
    """

    number: int
    source: str


Event: TypeAlias = Text | Reasoning | CallStart | CallArguments | CallRevoked


class ToolParser(Protocol):
    """Finds tool calls, or thinking, in a sequence's text.

    The sum of the events is the same however the text is cut into pieces.
    """

    def feed(self, text: str) -> list[Event]:
        """Returns the events that further characters settle; holds back possible parts of markers."""

    def finish(self) -> list[Event]:
        """Returns the events held back, at the end of the text. Call once."""

    def whole(self, text: str) -> list[Event]:
        """Returns the events of a whole text.

        Call it instead of :meth:`feed` and :meth:`finish`, not after them.
        """


_ALPHABET: Final = string.ascii_letters + string.digits


def call_id() -> str:
    """Returns an id in OpenAI's form."""
    return "call_" + "".join(secrets.choice(_ALPHABET) for _ in range(24))


def short_call_id() -> str:
    """Returns nine letters and digits: Mistral's chat templates accept no other ids."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


class CallCounter:
    """Numbers the calls of a sequence."""

    __slots__ = ("_new_id", "count")

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self.count = 0

    def start(self, name: str, given_id: str | None = None) -> CallStart:
        """Returns the next call, with the model's own id if given."""
        self.count += 1
        return CallStart(self.count - 1, given_id or self._new_id(), name)


def settled(events: Sequence[Event]) -> list[Event]:
    """Returns the events of a whole answer with the text of revoked calls in place of these calls."""
    revoked = {event.number for event in events if isinstance(event, CallRevoked)}
    kept: list[Event] = []
    for event in events:
        if isinstance(event, CallRevoked):
            kept.append(Text(event.source))
        elif not isinstance(event, CallStart | CallArguments) or event.number not in revoked:
            kept.append(event)
    return merged(kept)


def merged(events: Iterable[Event]) -> list[Event]:
    """Joins neighbouring pieces of the same text or the same call's arguments; drops empty pieces."""
    runs: list[tuple[Event, list[str]]] = []
    for event in events:
        piece = event.fragment if isinstance(event, CallArguments) else getattr(event, "text", None)
        if piece is None:
            runs.append((event, []))
        elif piece:
            if runs and _joins(runs[-1][0], event):
                runs[-1][1].append(piece)
            else:
                runs.append((event, [piece]))
    return [_filled(event, pieces) for event, pieces in runs]


def _joins(left: Event, right: Event) -> bool:
    if isinstance(left, CallArguments) and isinstance(right, CallArguments):
        return left.number == right.number
    return type(left) is type(right) and isinstance(right, Text | Reasoning)


def _filled(event: Event, pieces: Sequence[str]) -> Event:
    if isinstance(event, CallArguments):
        return CallArguments(event.number, "".join(pieces))
    if isinstance(event, Text):
        return Text("".join(pieces))
    if isinstance(event, Reasoning):
        return Reasoning("".join(pieces))
    return event
