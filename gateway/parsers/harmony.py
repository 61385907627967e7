"""Harmony, the format of gpt-oss: an answer is several messages, each in a channel.

::

    <|channel|>analysis<|message|>I need the weather.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>It rains.<|return|>

without the line breaks, after the prompt's ``<|start|>assistant``. Source: OpenAI's documentation of the
format. The channel ``analysis`` is thinking; ``final``, and ``commentary`` without a recipient, are content.
A message to a function is a call; its recipient may stand before the channel. Messages to other recipients
(the built-in tools ``browser`` and ``python``) are thinking or content by their channel.
"""

import re
from collections.abc import Callable, Collection
from typing import Final

from gateway.parsers.events import CallArguments, CallCounter, CallRevoked, CallStart, Event, Reasoning, Text
from gateway.parsers.json_scan import ValueScanner, skip_blanks
from gateway.parsers.parser_base import ParserBase, split_at
from gateway.parsers.reasoning import ThinkingFormat

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
CONSTRAIN: Final = "<|constrain|>"
MESSAGE: Final = "<|message|>"
END: Final = "<|end|>"
CALL: Final = "<|call|>"
RETURN: Final = "<|return|>"
MARKERS: Final = frozenset({START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN})

THOUGHTS: Final = ThinkingFormat(start=f"{CHANNEL}analysis{MESSAGE}", end=END, switches=())
"""The markers of thinking, for its budget; the parser needs none."""

ROLE: Final = "assistant"
FUNCTIONS: Final = "functions."

_AFTER_MESSAGE: Final = (END, CALL, RETURN, START, CHANNEL)
_AFTER_HEADER: Final = (MESSAGE, END, CALL, RETURN, START)
_RECIPIENT: Final = r"\s*(?:to=(?!<)([^\s<]+))?\s*"
_HEADER: Final = re.compile(
    rf"(?:<\|start\|>)?\s*(?:{ROLE}\b)?{_RECIPIENT}(?:<\|channel\|>\s*(analysis|commentary|final)\b)?{_RECIPIENT}"
    r"(?:<\|constrain\|>\s*\w+|json|code)?\s*"
)
_WORDS: Final = (
    ROLE,
    "to=f",
    f"{CHANNEL}final",
    "final",
    "analysis",
    "commentary",
    f"{CONSTRAIN}json",
    MESSAGE,
)
_LAST_WORD: Final = re.compile(r"(?:<\|?[a-z]*\|?|[a-z=]*)$")
# Beginnings of an answer that consists of messages.
_FIRST: Final = (*MARKERS, "to=")
# Longest header. Anything longer is shown.
_MAX_HEADER: Final = 512
_LONGEST_MARKER: Final = max(map(len, MARKERS))


class HarmonyParser(ParserBase):
    """Finds thinking, content and calls. Implements :class:`gateway.parsers.events.ToolParser`.

    Text outside messages, and headers that no message should have, are content. Arguments that are not JSON
    revoke their call. Messages of the same kind are separated by a line break, as in vLLM.
    """

    def __init__(self, new_id: Callable[[], str], names: Collection[str], begun: str = ROLE) -> None:
        """Waits for the text after the prompt.

        Args:
            new_id: makes ids of calls.
            names: the request's tools; without any, no message is a call.
            begun: the text of the prompt after its last ``<|start|>``.
        """
        super().__init__(self._header)
        self._counter = CallCounter(new_id)
        self._names = names
        # Length of the header's beginning in the prompt.
        self._begun = len(begun)
        # Of the current message: its kind, and the text before its first character.
        self._kind: type[Text | Reasoning] = Text
        self._separator = ""
        self._shown: set[type[Event]] = set()
        # Of the current call.
        self._called = ""
        self._source: list[str] = []
        self._start: CallStart | None = None
        self._scanner = ValueScanner()
        self.feed(begun)
        self._separator = ""
        self._shown.clear()
        if self._state == self._header and CHANNEL not in begun:
            self._state = self._begin

    def _begin(self, _: list[Event]) -> bool:
        """At the beginning of the text, which need not be a message."""
        text = self._rest[self._begun :].lstrip()
        if any(text.startswith(start) for start in _FIRST):
            self._state = self._header
        elif any(start.startswith(text) for start in _FIRST):
            return False
        else:
            self._forget_begun()
            self._enter(Text)
        return True

    def _forget_begun(self) -> None:
        self._rest, self._begun = self._rest[self._begun :], 0

    def _header(self, out: list[Event]) -> bool:
        """Reads a header, from its first marker on, up to the marker after it."""
        header, marker, rest = split_at(self._rest.removeprefix(START), _AFTER_HEADER)
        if self._rest.startswith(START):
            header = START + header
        if marker and len(header) <= _MAX_HEADER:
            # The model may stop after a header.
            self._rest = rest if marker == MESSAGE else marker + rest
            self._open(header, marker if marker == MESSAGE else "", out)
            self._begun = 0
        elif len(self._rest) > _MAX_HEADER + _LONGEST_MARKER:
            self._forget_begun()
            self._enter(Text)
            self._show(self._rest[:_MAX_HEADER], out)
            self._rest = self._rest[_MAX_HEADER:]
        else:
            return False
        return True

    def _open(self, header: str, marker: str, out: list[Event]) -> None:
        """Begins the message after ``header``."""
        raw = header[self._begun :] + marker
        parts = _HEADER.fullmatch(header)
        if parts is None:
            self._enter(Text)
            self._show(raw, out)
            return
        name = self._function(parts[1] or parts[3] or "")
        self._enter(Reasoning if parts[2] == "analysis" else Text)
        if name:
            self._called, self._source, self._start = name, [raw], None
            self._state = self._call

    def _function(self, recipient: str) -> str:
        """Returns the name of the function that ``recipient`` stands for; empty if it is none."""
        if recipient in self._names:
            return recipient
        return recipient.removeprefix(FUNCTIONS) if self._names and recipient.startswith(FUNCTIONS) else ""

    def _enter(self, kind: type[Text | Reasoning]) -> None:
        """Begins thinking or content."""
        self._kind, self._state = kind, self._message
        self._separator = "\n" if kind in self._shown else ""

    def _show(self, text: str, out: list[Event]) -> None:
        if text:
            out.append(self._kind(self._separator + text))
            self._separator = ""
            self._shown.add(self._kind)

    def _message(self, out: list[Event]) -> bool:
        """Within thinking or content."""
        if "<" not in self._rest:
            text, marker, rest = self._rest, "", ""
        else:
            text, marker, rest = split_at(self._rest, _AFTER_MESSAGE)
        self._show(text, out)
        self._rest = marker + rest
        if marker:
            self._state = self._between
        return bool(marker)

    def _between(self, _: list[Event]) -> bool:
        """After a message: another may follow, or text without a header."""
        if not self._skip():
            return False
        ended = next((end for end in (END, CALL, RETURN) if self._rest.startswith(end)), "")
        if not ended and any(marker.startswith(self._rest) for marker in MARKERS):
            return False
        if ended:
            self._passed()
            self._rest = self._rest[len(ended) :]
        elif any(self._rest.startswith(marker) for marker in MARKERS):
            self._passed()
            self._state = self._header
        else:
            self._back()
            self._enter(Text)
        return True

    def _take(self, count: int) -> str:
        taken, self._rest = self._rest[:count], self._rest[count:]
        self._source.append(taken)
        return taken

    def _call(self, out: list[Event]) -> bool:
        """Before the arguments of a call; without any they are empty."""
        self._take(skip_blanks(self._rest))
        ended = any(self._rest.startswith(end) for end in _AFTER_MESSAGE)
        if not self._rest or (not ended and any(end.startswith(self._rest) for end in _AFTER_MESSAGE)):
            return False
        if ended:
            self._call_nothing(out)
        elif self._rest[0] == "{":
            self._start, self._scanner = self._counter.start(self._called), ValueScanner()
            out.append(self._start)
            self._state = self._arguments
        else:
            self._give_up(out)
        return True

    def _call_nothing(self, out: list[Event]) -> None:
        start = self._counter.start(self._called)
        out.extend((start, CallArguments(start.number, "{}")))
        self._state = self._between

    def _arguments(self, out: list[Event]) -> bool:
        assert self._start is not None
        out.append(CallArguments(self._start.number, self._take(self._scanner.feed(self._rest))))
        if self._scanner.failed:
            self._give_up(out)
        elif self._scanner.done:
            self._state = self._between
        return self._scanner.done or self._scanner.failed

    def _give_up(self, out: list[Event]) -> None:
        """Shows the text of a call whose arguments are not JSON, and what follows it."""
        source = "".join(self._source)
        self._enter(Text)
        if self._start is None:
            self._show(source, out)
        else:
            out.append(CallRevoked(self._start.number, self._separator + source))
            self._separator = ""
            self._shown.add(Text)

    def _end(self, out: list[Event]) -> None:
        self._forget_begun()
        self._back()
        is_cut, before = _is_cut(self._rest.lstrip()), self._state
        if self._state == self._call:
            # The marker that ends a call ends the answer, too, and is no part of its text.
            if not self._rest or is_cut:
                self._call_nothing(out)
                return
            self._give_up(out)
        elif self._state not in (self._message, self._arguments):
            self._enter(Text)
        if not is_cut and (self._rest.strip() or before in (self._message, self._begin)):
            self._show(self._rest, out)


def _is_cut(text: str) -> bool:
    """Whether ``text`` is the beginning of a marker or header, in which there is nothing to show."""
    last = _LAST_WORD.search(text)
    assert last is not None
    stem = text[: last.start()]
    words = (word for word in (*_WORDS, *MARKERS) if word.startswith(last.group()))
    return "<|" in text and any(
        not stem or _HEADER.fullmatch(stem + word.removesuffix(MESSAGE)) for word in words
    )
