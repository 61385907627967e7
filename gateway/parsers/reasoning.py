"""Separates thinking from the answer, for models that write ``<think>…</think>`` first.

The end of the prompt decides: a final ``<think>`` has opened the thinking, a final ``</think>`` (Qwen 3 with
``enable_thinking: false``) has closed it.
"""

from enum import Enum, auto
from typing import Final, NamedTuple

from gateway.parsers.events import Event, Reasoning, Text
from gateway.parsers.parser_base import ParserBase, split_at

START: Final = "<think>"
END: Final = "</think>"
MARKERS: Final = frozenset({START, END})


class Marks(NamedTuple):
    """The markers around a model's thinking."""

    start: str = START
    end: str = END


THINK: Final = Marks()

# How many of a prompt's last tokens show the end of its generation prompt.
TAIL_TOKENS: Final = 16


class Thinking(Enum):
    """Where an answer begins, relative to the thinking."""

    OPEN = auto()
    """Inside the thinking."""
    POSSIBLE = auto()
    """Before it, if the model thinks at all."""
    OVER = auto()
    """After it."""


def thinking_at(prompt_tail: str, *, always: bool) -> Thinking:
    """Returns the beginning of the answer to a prompt.

    Args:
        prompt_tail: text of the prompt's last tokens, special ones included.
        always: the model thinks although the prompt opens no thinking (DeepSeek R1's first templates).
    """
    tail = prompt_tail.rstrip()
    if tail.endswith(END):
        return Thinking.OVER
    return Thinking.OPEN if always or tail.endswith(START) else Thinking.POSSIBLE


class ThinkParser(ParserBase):
    """Yields thinking as :class:`Reasoning` and the rest as :class:`Text`.

    Implements :class:`gateway.parsers.events.ToolParser`. If the text ends inside the thinking, all of it is
    thinking. Only the first end marker counts.
    """

    def __init__(self, at: Thinking) -> None:
        self._at = at
        super().__init__(self._answer if at is Thinking.OVER else self._begin)

    def _begin(self, out: list[Event]) -> bool:
        if not self._skip() or (START.startswith(self._rest) and self._rest != START):
            return False
        if self._rest.startswith(START):
            self._passed()
            self._rest, self._state = self._rest[len(START) :], self._thinking
            out.append(Reasoning(""))
        else:
            self._back()
            self._state = self._thinking if self._at is Thinking.OPEN else self._answer
        return True

    def _thinking(self, out: list[Event]) -> bool:
        thought, marker, self._rest = split_at(self._rest, (END,))
        out.append(Reasoning(thought))
        if marker:
            self._state = self._answer
        return bool(marker)

    def _answer(self, out: list[Event]) -> bool:
        out.append(Text(self._rest))
        self._rest = ""
        return False

    def _end(self, out: list[Event]) -> None:
        open_ = self._state == self._thinking or (self._state == self._begin and self._at is Thinking.OPEN)
        self._back()
        if self._rest:
            out.append(Reasoning(self._rest) if open_ else Text(self._rest))
