"""Encodes a streamed chat answer whose text is parsed for thinking and tool calls."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from gateway.answers.answer_reader import AnswerReader, finish_reason
from gateway.answers.generation import Delta
from gateway.answers.logprobs import TokenReport
from gateway.answers.streaming import ChatChunks
from gateway.parsers.events import CallRevoked, CallStart, Event

# The ids that our parsers and vLLM's make up. Others are the model's own.
_MADE_UP: Final = re.compile(r"(call_|chatcmpl-tool-)[0-9a-zA-Z]{9,32}|[0-9a-zA-Z]{9}")


@dataclass(slots=True)
class _Choice:
    reader: AnswerReader
    unreported: list[TokenReport] = field(default_factory=list)
    """Tokens whose text the reader holds back, or that belong to a marker; the next chunk reports them."""

    def take_reports(self) -> list[TokenReport]:
        """Returns the unreported tokens and forgets them."""
        tokens, self.unreported = self.unreported, []
        return tokens


class ChatStreamWriter:
    """Writes the events that readers find in the text, with one reader per choice."""

    def __init__(self, chunks: ChatChunks, new_reader: Callable[[], AnswerReader], *, named: bool) -> None:
        """Creates a writer.

        Args:
            chunks: encodes the chunks.
            new_reader: makes the reader of one choice.
            named: whether the request names the tool to call.
        """
        self._chunks = chunks
        self._new_reader = new_reader
        self._named = named
        self._choices: dict[int, _Choice] = {}

    def write(self, delta: Delta) -> bytes:
        """Returns the chunks that the text settles; at the end also the text held back, and the reason."""
        index, text, reason, stop_reason, tokens = delta
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = _Choice(self._new_reader())
        reader, chunks = choice.reader, self._chunks
        choice.unreported += tokens
        events = reader.feed(text)
        if reason is not None:
            events += reader.finish()
        out = [
            chunks.event(index, self._with_stable_id(index, event), choice.take_reports())
            for event in events
            if not isinstance(event, CallRevoked)
        ]
        if reason is not None:
            if rest := choice.take_reports():
                out.append(chunks.text(index, "", rest))
            out.append(
                chunks.end(index, finish_reason(reason, reader.num_calls, named=self._named), stop_reason)
            )
        return b"".join(out)

    def _with_stable_id(self, index: int, event: Event) -> Event:
        """Gives a call an id that depends on its place alone: a stream that is continued repeats it."""
        if not isinstance(event, CallStart) or (match := _MADE_UP.fullmatch(event.id)) is None:
            return event
        place = f"{self._chunks.answer_id}/{index}/{event.number}".encode()
        digits = hashlib.blake2b(place, digest_size=16).hexdigest()
        prefix = match[1] or ""
        return event._replace(id=prefix + digits[: len(event.id) - len(prefix)])
