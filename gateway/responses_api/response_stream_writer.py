"""Writes the events of a streamed response."""

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from gateway.answers.delta_reader import DeltaReader
from gateway.answers.generation import Usage
from gateway.answers.logprobs import Reporter, TokenReport
from gateway.answers.sequence_text import Delta
from gateway.answers.streaming import ResponseWriter
from gateway.parsers.events import CallRevoked, CallStart, Event, Text
from gateway.responses_api.answer_body import ResponseObject, error_event
from gateway.responses_api.output_items import CustomCallItem, MessageItem, OutputItem, Status
from gateway.schemas.answers import ChatToken
from protos.errors import TriptychError


class ResponseStreamWriter(ResponseWriter):
    """Writes typed, numbered events; there is no terminator after the last one."""

    def __init__(self, response: ResponseObject, reader: DeltaReader | None, reporter: Reporter) -> None:
        """Creates a writer.

        Args:
            response: writes the response object.
            reader: finds the events in the text; ``None``: all of it is the message.
            reporter: writes log-probabilities, if they were asked for.
        """
        self._response = response
        self._reader = reader
        self._reporter = reporter
        self._output = response.output()
        self._open: OutputItem | None = None
        self._delta_head = b""
        self._began = False
        self._cut = False
        self._count = 0

    def begin(self) -> bytes:
        """Returns the events that show the response object, still empty."""
        self._began = True
        response = self._response.in_progress()
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def write(self, delta: Delta) -> bytes:
        """Returns the events that the text settles; at the end also those that close the last item."""
        item, text = self._open, delta.text
        if self._reader is None and item is not None and not (delta.tokens or delta.finish_reason):
            # Most deltas of most answers.
            item.pieces.append(text)
            return self._text_delta(text) if text else b""
        out: list[bytes] = []
        for event, tokens in self._events(delta):
            item = self._output.take(event)
            if item is self._output.items[-1] and item is not self._open:
                out += (self._close("completed"), self._opening(item))
            # Most of a custom call's arguments before its input show nothing.
            is_shown = bool(item.pieces and item.pieces[-1]) or not isinstance(item, CustomCallItem)
            if is_shown and not isinstance(event, CallStart | CallRevoked):
                out.append(self._delta(item, item.pieces[-1], tokens))
        if delta.finish_reason is not None:
            self._cut = delta.finish_reason == "length"
            out.append(self._last(self._reader.take_reports() if self._reader is not None else []))
        return b"".join(out)

    def _events(self, delta: Delta) -> Iterable[tuple[Event, Sequence[TokenReport]]]:
        if self._reader is not None:
            return self._reader.read(delta)
        return [(Text(delta.text), delta.tokens)] if delta.text or delta.tokens else []

    def end(self, usage: Usage) -> bytes:
        """Returns the event with the whole response."""
        response = self._response.ended(self._output.bodies(cut=self._cut), usage, cut=self._cut)
        return self._event(f"response.{response['status']}", response=response)

    def error(self, error: TriptychError) -> bytes:
        """Returns the event for the error, and the response that failed if the stream has begun."""
        if not self._began:
            return only_error(error)
        event = self._event("error", **error_event(error))
        response = self._response.failed(self._output.bodies(cut=True), error)
        return event + self._event("response.failed", response=response)

    def _last(self, tokens: Sequence[TokenReport]) -> bytes:
        """Closes the last item; an answer without any has an empty message."""
        opening = b""
        if not self._output.items:
            opening = self._opening(self._output.add_message())
        item = self._output.items[-1]
        if tokens and self._reporter.wanted and isinstance(item, MessageItem):
            opening += self._delta(item, "", tokens)
        return opening + self._close("incomplete" if self._cut else "completed")

    def _opening(self, item: OutputItem) -> bytes:
        self._open = item
        added = self._event(
            "response.output_item.added", output_index=item.index, item=item.body("in_progress")
        )
        if item.has_parts:
            added += self._event("response.content_part.added", **_place(item), part=item.part(""))
        # Only the number and the text differ from one delta of an item to the next.
        kind = f"{item.event_prefix}.delta"
        fields = {"type": kind, **_place(item)}
        if isinstance(item, MessageItem):
            fields["logprobs"] = []
        self._delta_head = (
            b"event: "
            + kind.encode()
            + b"\ndata: "
            + orjson.dumps(fields)[:-1]
            + b',"sequence_number":%d,"delta":'
        )
        return added

    def _text_delta(self, text: str) -> bytes:
        """Returns the event for further text of the open item."""
        self._count += 1
        return self._delta_head % (self._count - 1) + orjson.dumps(text) + b"}\n\n"

    def _delta(self, item: OutputItem, text: str, tokens: Sequence[TokenReport]) -> bytes:
        logprobs = chat_logprobs(self._reporter, tokens) if tokens and isinstance(item, MessageItem) else []
        if item is self._open and not logprobs:
            return self._text_delta(text)
        fields = {**_place(item), "delta": text}
        if isinstance(item, MessageItem):
            item.logprobs += logprobs
            fields["logprobs"] = [_without_bytes(entry) for entry in logprobs]
        return self._event(f"{item.event_prefix}.delta", **fields)

    def _close(self, status: Status) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        text = item.text
        fields = {**_place(item), item.text_field: text}
        if isinstance(item, MessageItem):
            fields["logprobs"] = [_without_bytes(entry) for entry in item.logprobs]
        out = self._event(f"{item.event_prefix}.done", **fields)
        if item.has_parts:
            out += self._event("response.content_part.done", **_place(item), part=item.part(text))
        return out + self._event("response.output_item.done", output_index=item.index, item=item.body(status))

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._count += 1
        return _encode_event(kind, self._count - 1, **fields)


def only_error(error: TriptychError) -> bytes:
    """Returns the event for an error before the response object is known."""
    return _encode_event("error", 0, **error_event(error))


def _encode_event(kind: str, number: int, **fields: Any) -> bytes:
    data = orjson.dumps({"type": kind, "sequence_number": number, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def chat_logprobs(reporter: Reporter, tokens: Sequence[TokenReport]) -> list[ChatToken]:
    """Returns the log-probabilities of a message's tokens; none if they were not asked for."""
    reported = reporter.chat(tokens)
    return [] if reported is None else reported["content"]


def _without_bytes(entry: ChatToken) -> dict[str, Any]:
    """Returns a token's log-probability as events have it."""
    top = [{"token": likely["token"], "logprob": likely["logprob"]} for likely in entry["top_logprobs"]]
    return {"token": entry["token"], "logprob": entry["logprob"], "top_logprobs": top}


def _place(item: OutputItem) -> dict[str, Any]:
    place: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
    return {**place, "content_index": 0} if item.has_parts else place
