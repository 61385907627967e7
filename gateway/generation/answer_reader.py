"""Reads a sequence's text as a chat message: thinking, content and tool calls, streamed or at once."""

from collections.abc import Iterable, Iterator

from gateway.generation.logprobs import TokenReport
from gateway.generation.sequence_text import Delta
from gateway.parsers.events import (
    CallRevoked,
    CallStart,
    Event,
    Reasoning,
    Text,
    ToolParser,
    merged,
)


class Trim:
    """Removes white space that only separates parts: around thinking, and before or after all calls.

    Text on both sides of a call keeps the white space around it. An answer without thinking and calls stays
    unchanged, to the last line break.
    """

    def __init__(self) -> None:
        self._part: type[Event] | None = None
        # White space since the last text shown. It belongs to the answer only if more text follows.
        self._held: list[str] = []
        self._fresh = False
        self._has_content = False
        # Whether no text has followed the calls yet that the held white space surrounds.
        self._separates = False

    def push(self, events: Iterable[Event]) -> Iterator[Event]:
        """Yields the events without separating white space; some of it may come with later events."""
        for event in events:
            if isinstance(event, Text | Reasoning):
                yield from self._text(event)
            elif isinstance(event, CallRevoked):
                # The text behind it continues its source.
                source = "".join(self._held) + event.source
                self._part, self._has_content = Text, True
                self._fresh = self._separates = False
                self._held.clear()
                yield event._replace(source=source)
            else:
                if isinstance(event, CallStart):
                    if self._part is Reasoning:
                        self._held.clear()
                    self._part = CallStart
                yield event

    def _text(self, event: Text | Reasoning) -> Iterator[Event]:
        kind = type(event)
        if not event.text and kind is Text:
            return
        if kind is not self._part:
            self._enter(kind)
        text = event.text.lstrip() if self._fresh else event.text
        shown = text.rstrip()
        if shown:
            self._fresh = self._separates = False
            self._has_content |= kind is Text
            yield kind("".join(self._held) + shown)
            self._held.clear()
        if len(shown) < len(text):
            self._held.append(text[len(shown) :])

    def _enter(self, kind: type[Event]) -> None:
        """Begins a part; keeps or drops the white space before it."""
        continues = self._part is CallStart and kind is Text and self._has_content
        # Thinking starts behind a marker. Content at the beginning of an answer keeps its white space.
        self._fresh = not continues and (self._part is not None or kind is Reasoning)
        self._part, self._separates = kind, continues
        if not continues:
            self._held.clear()

    def finish(self) -> Iterator[Event]:
        """Yields the text held back, at the end of the answer."""
        if self._part is Text and self._held and not self._separates:
            yield Text("".join(self._held))


class AnswerReader:
    """Reads a sequence's text."""

    num_calls: int
    """Calls so far, without revoked calls."""

    def __init__(
        self,
        thinking: ToolParser | None,
        calls: ToolParser | None,
        *,
        one_call: bool = False,
        show_thinking: bool = True,
    ) -> None:
        """Combines two parsers: the second reads the content found by the first.

        Args:
            thinking: finds thinking, if the model thinks.
            calls: finds tool calls, if the answer may have some.
            one_call: drop calls after the first.
            show_thinking: whether the client wants to see the thinking.
        """
        self._thinking = thinking
        self._calls = calls
        self._one_call = one_call
        self._show_thinking = show_thinking
        self._trim = Trim()
        self.num_calls = 0

    def feed(self, text: str) -> list[Event]:
        """Returns the events settled by further characters."""
        parts = self._thinking.feed(text) if self._thinking else [Text(text)]
        return self._read(self._into_calls(parts))

    def finish(self) -> list[Event]:
        """Returns the events held back, at the end of the text. Call once."""
        parts = list(self._into_calls(self._thinking.finish())) if self._thinking else []
        if self._calls is not None:
            parts += self._calls.finish()
        return self._read(parts, last=True)

    def whole(self, text: str) -> list[Event]:
        """Returns the events of a whole text. Call it instead of :meth:`feed` and :meth:`finish`."""
        parts: list[Event] = self._thinking.whole(text) if self._thinking else [Text(text)]
        if self._calls is not None:
            content = "".join(part.text for part in parts if isinstance(part, Text))
            parts = [*(part for part in parts if not isinstance(part, Text)), *self._calls.whole(content)]
        return self._read(parts, last=True)

    def _into_calls(self, parts: Iterable[Event]) -> Iterator[Event]:
        for part in parts:
            if self._calls is not None and isinstance(part, Text):
                yield from self._calls.feed(part.text)
            else:
                yield part

    def _read(self, parts: Iterable[Event], *, last: bool = False) -> list[Event]:
        events = list(self._trim.push(self._wanted(parts)))
        if last:
            events += self._trim.finish()
        if not self._show_thinking:
            events = [event for event in events if not isinstance(event, Reasoning)]
        for event in events:
            self.num_calls += isinstance(event, CallStart) - isinstance(event, CallRevoked)
        return merged(events)

    def _wanted(self, parts: Iterable[Event]) -> Iterator[Event]:
        for part in parts:
            if not self._one_call or isinstance(part, Text | Reasoning) or part.number == 0:
                yield part
            elif isinstance(part, CallRevoked):
                # The call was dropped, so the client has not seen it.
                yield Text(part.source)


class DeltaReader:
    """Finds the events in a sequence's deltas, each with the tokens to report."""

    def __init__(self, reader: AnswerReader) -> None:
        """Wraps the parser of the sequence's text."""
        self._reader = reader
        # Tokens whose text the reader holds back, or that belong to a marker; the next event reports them.
        self._unreported: list[TokenReport] = []

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return self._reader.num_calls

    def read(self, delta: Delta) -> Iterator[tuple[Event, list[TokenReport]]]:
        """Yields the events settled by the delta, each with the tokens to report.

        At the sequence's end, they include the text held back. A stream cannot take back a call that is
        revoked; it may mark it.
        """
        self._unreported += delta.tokens
        events = self._reader.feed(delta.text)
        if delta.finish_reason is not None:
            events += self._reader.finish()
        for event in events:
            revoked = isinstance(event, CallRevoked)
            yield event, [] if revoked else self.take_reports()

    def take_reports(self) -> list[TokenReport]:
        """Returns the tokens not yet reported by an event, and forgets them."""
        tokens, self._unreported = self._unreported, []
        return tokens
