"""What reading an answer yields, and the interface of all that read tool calls."""

import secrets
import string
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias


class Text(NamedTuple):
    """Content for the client."""

    text: str


class Reasoning(NamedTuple):
    """The model's thinking."""

    text: str


class CallStart(NamedTuple):
    """A call begins: its name is known, its arguments follow."""

    # 0-based among the answer's calls.
    number: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments: text of a JSON object, piece by piece."""

    number: int
    fragment: str


class CallRevoked(NamedTuple):
    """What began as a call is none: its arguments are not JSON.

    A stream cannot take back what it has sent; a collected answer shows ``source`` as content instead of the call.
    """

    number: int
    source: str


Event: TypeAlias = Text | Reasoning | CallStart | CallArguments | CallRevoked


class ToolParser(Protocol):
    """Finds the tool calls in one sequence's text.

    What the events add up to does not depend on how the text was cut into pieces.
    """

    def feed(self, text: str) -> list[Event]:
        """What these further characters settle; never a part of a marker."""

    def finish(self) -> list[Event]:
        """What was held back, when no text follows. Call once."""

    def whole(self, text: str) -> list[Event]:
        """A whole text at once: instead of :meth:`feed` and :meth:`finish`, not after them."""


_ALPHABET: Final = string.ascii_letters + string.digits


def call_id() -> str:
    """An id as OpenAI's."""
    return "call_" + "".join(secrets.choice(_ALPHABET) for _ in range(24))


def short_call_id() -> str:
    """Nine letters and digits: Mistral's chat templates take no other ids."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


class Counter:
    """Numbers the calls of one sequence."""

    __slots__ = ("_new_id", "count")

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self.count = 0

    def start(self, name: str, given_id: str | None = None) -> CallStart:
        """The next call; with the model's own id if it gave one."""
        self.count += 1
        return CallStart(self.count - 1, given_id or self._new_id(), name)


def merged(events: Iterable[Event]) -> list[Event]:
    """The same events with neighbouring pieces of one text or one call's arguments joined; empty pieces vanish."""
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
