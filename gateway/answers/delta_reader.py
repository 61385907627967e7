"""Reads the deltas of one streamed sequence as events: thinking, content and tool calls."""

from collections.abc import Iterator

from gateway.answers.answer_reader import AnswerReader
from gateway.answers.logprobs import TokenReport
from gateway.answers.sequence_text import Delta
from gateway.parsers.events import CallRevoked, Event


class DeltaReader:
    """Finds the events in one sequence's deltas, and says which tokens to report with each."""

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
        """Yields the events that the delta settles, each with the tokens to report with it.

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
        """Returns the tokens that no event has reported, and forgets them."""
        tokens, self._unreported = self._unreported, []
        return tokens
