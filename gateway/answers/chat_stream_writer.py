"""Encodes a streamed chat answer whose text is parsed for thinking and tool calls."""

from collections.abc import Callable

from gateway.answers.answer_reader import AnswerReader, finish_reason
from gateway.answers.chunks import ChatChunks
from gateway.answers.delta_reader import DeltaReader
from gateway.answers.sequence_text import Delta


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
        self._choices: dict[int, DeltaReader] = {}

    def write(self, delta: Delta) -> bytes:
        """Returns the chunks that the text settles; at the end also the text held back, and the reason."""
        index, reason, chunks = delta.sequence, delta.finish_reason, self._chunks
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = DeltaReader(self._new_reader())
        out = [chunks.event(index, event, tokens) for event, tokens in choice.read(delta)]
        if delta.token_ids:
            out.append(chunks.ids(index, delta.token_ids))
        if reason is not None:
            if rest := choice.take_reports():
                out.append(chunks.text(index, "", rest))
            reason = finish_reason(reason, choice.num_calls, named=self._named)
            out.append(chunks.end(index, reason, delta.stop_reason))
        return b"".join(out)
