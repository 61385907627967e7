"""Reads the deltas of one streamed sequence as events: thinking, content and tool calls."""

import hashlib
import re
from collections.abc import Iterator
from typing import Final

from gateway.answers.answer_reader import AnswerReader
from gateway.answers.logprobs import TokenReport
from gateway.answers.sequence_text import Delta
from gateway.parsers.events import CallRevoked, CallStart, Event

# The ids that our parsers and vLLM's make up. Others are the model's own.
_MADE_UP: Final = re.compile(r"(call_|chatcmpl-tool-)[0-9a-zA-Z]{9,32}|[0-9a-zA-Z]{9}")


class DeltaReader:
    """Finds the events in one sequence's deltas, and says which tokens to report with each."""

    def __init__(self, reader: AnswerReader, place: str) -> None:
        """Creates a reader.

        Args:
            reader: parses the text.
            place: the answer's id and the sequence's number, which give calls their ids.
        """
        self._reader = reader
        self._place = place
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
            yield self._with_stable_id(event), [] if revoked else self.take_reports()

    def take_reports(self) -> list[TokenReport]:
        """Returns the tokens that no event has reported, and forgets them."""
        tokens, self._unreported = self._unreported, []
        return tokens

    def _with_stable_id(self, event: Event) -> Event:
        """Gives a call an id that depends on its place alone: a stream that is continued repeats it."""
        if not isinstance(event, CallStart) or (match := _MADE_UP.fullmatch(event.id)) is None:
            return event
        digits = hashlib.blake2b(f"{self._place}/{event.number}".encode(), digest_size=16).hexdigest()
        prefix = match[1] or ""
        return event._replace(id=prefix + digits[: len(event.id) - len(prefix)])
