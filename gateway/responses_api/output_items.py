"""The items of an answer: thinking, the message, and calls, as they grow with the events of its text."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal

from gateway.parsers.events import CallArguments, CallRevoked, CallStart, Event, Reasoning, Text, merged
from gateway.responses_api.answers import (
    OutputCustomCall,
    OutputFunctionCall,
    OutputItemAnswer,
    OutputMessage,
    OutputPart,
    OutputReasoning,
    OutputText,
    ReasoningContent,
)
from gateway.responses_api.tools import ScopedName
from gateway.schemas.answers import ChatToken
from gateway.tools.custom_tools import InputReader

Status = Literal["in_progress", "completed", "incomplete"]

_UNNAMED: Final = ScopedName("")


@dataclass(slots=True)
class OutputItem(ABC):
    """One item of an answer."""

    event_prefix: ClassVar[str]
    """What the names of the events about its text begin with."""
    text_field: ClassVar[str] = "text"
    """What the event about its whole text calls it."""

    id: str
    index: int
    """Its place in the answer."""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Its text so far."""
        return "".join(self.pieces)

    def add(self, piece: str) -> None:
        """Takes a further piece of its text."""
        self.pieces.append(piece)

    @property
    def has_parts(self) -> bool:
        """Whether its text is a part of its content."""
        return True

    def part(self, text: str) -> OutputPart:
        """Returns the part of its content with ``text``: all of it, or none yet."""
        raise NotImplementedError

    @abstractmethod
    def body(self, status: Status) -> OutputItemAnswer:
        """Returns the item, without text while it is in progress."""


@dataclass(slots=True)
class MessageItem(OutputItem):
    """The text of the answer."""

    event_prefix = "response.output_text"

    logprobs: list[ChatToken] = field(default_factory=list)

    def part(self, text: str) -> OutputText:
        """Returns the part with the text."""
        logprobs = self.logprobs if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def body(self, status: Status) -> OutputMessage:
        """Returns the message."""
        content = [] if status == "in_progress" else [self.part(self.text)]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}


@dataclass(slots=True)
class ThinkingItem(OutputItem):
    """Thinking in front of the answer."""

    event_prefix = "response.reasoning_text"

    def part(self, text: str) -> ReasoningContent:
        """Returns the part with the thinking."""
        return {"type": "reasoning_text", "text": text}

    def body(self, status: Status) -> OutputReasoning:
        """Returns the item without a summary or an encrypted form."""
        content = [] if status == "in_progress" else [self.part(self.text)]
        return {
            "id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content,
            "encrypted_content": None,
        }  # fmt: skip


@dataclass(slots=True)
class CallItem(OutputItem):
    """A call of a function."""

    event_prefix = "response.function_call_arguments"
    text_field = "arguments"

    call_id: str = ""
    name: ScopedName = _UNNAMED
    revoked: bool = False
    """Whether its arguments turned out not to be JSON, when a stream had announced it."""

    @property
    def has_parts(self) -> bool:
        """Whether its text is a part of its content."""
        return False

    def body(self, status: Status) -> OutputItemAnswer:
        """Returns the call."""
        body: OutputFunctionCall = {
            "id": self.id, "type": "function_call", "status": self._status(status), "call_id": self.call_id,
            "name": self.name.name, "arguments": "" if status == "in_progress" else self.text,
        }  # fmt: skip
        if self.name.namespace is not None:
            body["namespace"] = self.name.namespace
        return body

    def _status(self, status: Status) -> Status:
        return "incomplete" if self.revoked and status == "completed" else status


@dataclass(slots=True)
class CustomCallItem(CallItem):
    """A call of a custom tool, whose text is the input in the arguments."""

    event_prefix = "response.custom_tool_call_input"
    text_field = "input"

    reader: InputReader = field(default_factory=InputReader)

    def body(self, status: Status) -> OutputItemAnswer:
        """Returns the call."""
        body: OutputCustomCall = {
            "id": self.id, "type": "custom_tool_call", "status": self._status(status), "call_id": self.call_id,
            "name": self.name.name, "input": "" if status == "in_progress" else self.text,
        }  # fmt: skip
        if self.name.namespace is not None:
            body["namespace"] = self.name.namespace
        return body

    def add(self, piece: str) -> None:
        """Takes a further piece of the arguments."""
        self.pieces.append(self.reader.feed(piece))


class Output:
    """The items of one answer, in order."""

    def __init__(self, answer_id: str, names: Mapping[str, ScopedName]) -> None:
        """Creates an answer without items.

        Args:
            answer_id: the items are named after it.
            names: the client's names of tools by the names that the model knows.
        """
        self._names = names
        self._suffix = answer_id.partition("_")[2]
        self.items: list[OutputItem] = []
        self._calls: dict[int, CallItem] = {}

    def take(self, event: Event) -> OutputItem:
        """Adds an event to the item that it belongs to; that is a new last item if the event begins one."""
        last = self.items[-1] if self.items else None
        match event:
            case Text(text):
                item = last if isinstance(last, MessageItem) else self.add_message()
            case Reasoning(text):
                item = last if isinstance(last, ThinkingItem) else self._add(ThinkingItem(*self._place("rs")))
            case CallStart(number, call_id, name):
                scoped = self._names.get(name) or ScopedName(name)
                kind, prefix = (CustomCallItem, "ctc") if scoped.custom else (CallItem, "fc")
                call = kind(*self._place(prefix), call_id=call_id, name=scoped)
                self._calls[number] = call
                return self._add(call)
            case CallArguments(number, text):
                item = self._calls[number]
            case _:
                call = self._calls[event.number]
                call.revoked = True
                return call
        item.add(text)
        return item

    def add_message(self) -> OutputItem:
        """Returns a new message, after the other items."""
        return self._add(MessageItem(*self._place("msg")))

    def bodies(self, *, cut: bool) -> list[OutputItemAnswer]:
        """Returns the items; if the answer was ``cut``, the last one is incomplete."""
        last = len(self.items) - 1
        return [item.body("incomplete" if cut and item.index == last else "completed") for item in self.items]

    def _place(self, prefix: str) -> tuple[str, int]:
        index = len(self.items)
        return f"{prefix}_{self._suffix}_{index}", index

    def _add(self, item: OutputItem) -> OutputItem:
        self.items.append(item)
        return item


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


def collected(output: Output, events: Sequence[Event], logprobs: list[ChatToken]) -> Output:
    """Fills ``output`` with a whole answer. Its log-probabilities are those of the first message."""
    for event in settled(events):
        output.take(event)
    if not output.items:
        output.add_message()
    for item in output.items:
        if isinstance(item, MessageItem):
            item.logprobs = logprobs
            break
    return output
