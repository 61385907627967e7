"""Reads one sequence's text as a chat message: thinking, content and tool calls, streamed or at once."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from gateway.parsers.events import (
    CallArguments,
    CallRevoked,
    CallStart,
    Event,
    Reasoning,
    Text,
    ToolParser,
    merged,
)
from gateway.schemas.answers import AssistantMessage, ToolCall


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
        """Begins a part; decides what becomes of the white space before it."""
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
    """Reads one sequence's text."""

    num_calls: int
    """Calls so far that have not been revoked."""

    def __init__(
        self,
        thinking: ToolParser | None,
        calls: ToolParser | None,
        *,
        one_call: bool = False,
        show_thinking: bool = True,
    ) -> None:
        """Combines two parsers: the second gets the text that the first takes for content.

        Args:
            thinking: finds thinking, if the model thinks.
            calls: finds tool calls, if the answer may have some.
            one_call: drop calls behind the first.
            show_thinking: whether the client wants to see the thinking.
        """
        self._thinking = thinking
        self._calls = calls
        self._one_call = one_call
        self._show_thinking = show_thinking
        self._trim = Trim()
        self.num_calls = 0

    def feed(self, text: str) -> list[Event]:
        """Returns the events that these further characters settle."""
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


class ThinkingMeter:
    """Counts the tokens of one sequence's thinking; its markers count, too."""

    def __init__(self, parser: ToolParser) -> None:
        """Counts the thinking that ``parser`` finds."""
        self._parser: ToolParser | None = parser
        self.num_tokens = 0

    def feed(self, text: str, num_tokens: int) -> None:
        """Takes the text that further tokens complete; they are the sequence's first ``num_tokens``."""
        if self._parser is None:
            return
        events = self._parser.feed(text)
        if any(isinstance(event, Text) and event.text for event in events):
            self._parser = None
        elif events:
            self.num_tokens = num_tokens


@dataclass(slots=True)
class CollectedMessage:
    """A chat message, collected from events."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, ToolCall] = field(default_factory=dict)

    @classmethod
    def of(cls, events: Iterable[Event]) -> "CollectedMessage":
        """Returns the message that ``events`` add up to."""
        message = cls()
        for event in events:
            match event:
                case Text(text):
                    message.content.append(text)
                case Reasoning(text):
                    message.reasoning.append(text)
                case CallStart(number, id_, name):
                    message.calls[number] = {
                        "id": id_, "type": "function", "function": {"name": name, "arguments": ""},
                    }  # fmt: skip
                case CallArguments(number, fragment):
                    message.calls[number]["function"]["arguments"] += fragment
                case CallRevoked(number, source):
                    del message.calls[number]
                    message.content.append(source)
        return message

    def body(self, *, with_reasoning: bool) -> AssistantMessage:
        """Returns OpenAI's message object. Thinking appears under vLLM's name and under DeepSeek's."""
        content = "".join(self.content)
        body: AssistantMessage = {
            "role": "assistant",
            "content": content if content or not (self.calls or self.reasoning) else None,
            "refusal": None,
        }
        if with_reasoning:
            body["reasoning"] = body["reasoning_content"] = "".join(self.reasoning) or None
        if self.calls:
            body["tool_calls"] = list(self.calls.values())
        return body


def finish_reason(reason: str, num_calls: int, *, named: bool) -> str:
    """Returns OpenAI's reason for an answer with calls; for the call of a named tool it stays "stop"."""
    return "tool_calls" if reason == "stop" and num_calls and not named else reason
