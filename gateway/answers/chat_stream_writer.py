"""A streamed chat answer whose text is read for thinking and tool calls on its way out."""

from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.answers.answer_reader import AnswerReader, finish_reason
from gateway.answers.generation import Delta
from gateway.answers.logprobs import TokenReport
from gateway.answers.sse import ChatChunks
from gateway.parsers.events import CallRevoked


@dataclass(slots=True)
class _Choice:
    reader: AnswerReader
    # Whose text the reader holds back, or is part of a marker: they are reported with what is told next.
    untold: list[TokenReport] = field(default_factory=list)

    def told(self) -> list[TokenReport]:
        """The tokens that were not reported yet; they are now."""
        tokens, self.untold = self.untold, []
        return tokens


class ChatStreamWriter:
    """Writes what readers find in the text, one reader a choice."""

    def __init__(self, chunks: ChatChunks, new_reader: Callable[[], AnswerReader], *, named: bool) -> None:
        """Writes with ``chunks``; ``named`` says that the call of a named tool is what is read."""
        self._chunks = chunks
        self._new_reader = new_reader
        self._named = named
        self._choices: dict[int, _Choice] = {}

    def write(self, delta: Delta) -> bytes:
        """What the text settles, perhaps nothing; at the end also what was held back, and the reason."""
        index, text, reason, stop_reason, tokens = delta
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = _Choice(self._new_reader())
        reader, chunks = choice.reader, self._chunks
        choice.untold += tokens
        events = reader.feed(text)
        if reason is not None:
            events += reader.finish()
        out = [
            chunks.event(index, event, choice.told())
            for event in events
            if not isinstance(event, CallRevoked)
        ]
        if reason is not None:
            if rest := choice.told():
                out.append(chunks.text(index, "", rest))
            out.append(
                chunks.end(index, finish_reason(reason, reader.num_calls, named=self._named), stop_reason)
            )
        return b"".join(out)
