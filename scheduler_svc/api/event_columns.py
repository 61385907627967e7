"""Writes the events of a Connect stream as messages: plain tokens in columns, the rest as full events."""

from collections.abc import Iterator, Sequence
from typing import Final

from protos.service.grpc_options import FULL_MESSAGE_BYTES
from protos.triptych.v1 import inference_pb2
from scheduler_svc.api.messages import event_to_protos
from scheduler_svc.requests.request import Event, TokenColumns

# Upper bound of a handle's and a token's size on the wire.
_ROW_BYTES: Final = 15


class ConnectEncoder:
    """Gives each sequence a handle in its first event, and names it by the handle from then on."""

    def __init__(self) -> None:
        self._handles: dict[str, dict[int, int]] = {}
        self._num_handles = 0
        self._response = inference_pb2.ConnectResponse()
        self._size = 0
        # A batch sends the same list of request ids with each step until it changes.
        self._known_ids: Sequence[str] | None = None
        self._known_handles: Sequence[int] = ()

    def encode(self, events: Sequence[Event | TokenColumns]) -> Iterator[inference_pb2.ConnectResponse]:
        """Yields the messages of some events; each is below the message limit of any client."""
        for event in events:
            if isinstance(event, tuple):
                yield from self._add_columns(*event)
            elif _is_plain(event) and (handle := self._handle(event.request_id, event.sequence)) is not None:
                yield from self._add_tokens((handle,) * len(event.token_ids), event.token_ids)
            else:
                yield from self._add_event(event)
        if self._size:
            yield self._take()

    def _handle(self, request_id: str, sequence: int = 0) -> int | None:
        return self._handles.get(request_id, {}).get(sequence)

    def _add_columns(
        self, request_ids: Sequence[str], token_ids: Sequence[int]
    ) -> Iterator[inference_pb2.ConnectResponse]:
        if request_ids is self._known_ids:
            yield from self._add_tokens(self._known_handles, token_ids)
            return
        handles = [self._handle(request_id) for request_id in request_ids]
        known = [handle for handle in handles if handle is not None]
        if len(known) == len(handles):
            self._known_ids, self._known_handles = request_ids, known
            yield from self._add_tokens(known, token_ids)
            return
        for request_id, handle, token_id in zip(request_ids, handles, token_ids, strict=True):
            if handle is None:
                yield from self._add_event(Event(request_id, (token_id,)))
            else:
                yield from self._add_tokens((handle,), (token_id,))

    def _add_tokens(
        self, handles: Sequence[int], token_ids: Sequence[int]
    ) -> Iterator[inference_pb2.ConnectResponse]:
        """Adds to the columns, which come before the events of a message."""
        if self._response.events or self._size > FULL_MESSAGE_BYTES:
            yield self._take()
        self._response.handles.extend(handles)
        self._response.token_ids.extend(token_ids)
        self._size += _ROW_BYTES * len(handles)

    def _add_event(self, event: Event) -> Iterator[inference_pb2.ConnectResponse]:
        for message, num_bytes in event_to_protos(event):
            if self._size and self._size + num_bytes > FULL_MESSAGE_BYTES:
                yield self._take()
            if event.finish_reason is not None or event.error is not None:
                self._forget(event)
            elif event.token_ids and self._handle(event.request_id, event.sequence) is None:
                self._num_handles += 1
                message.handle = self._num_handles
                self._handles.setdefault(event.request_id, {})[event.sequence] = message.handle
            self._response.events.append(message)
            self._size += num_bytes

    def _forget(self, event: Event) -> None:
        """Drops the handle of an ended sequence, or all handles of a failed request."""
        handles = self._handles.get(event.request_id)
        if handles is None:
            return
        handles.pop(event.sequence, None)
        if event.error is not None or not handles:
            del self._handles[event.request_id]
        self._known_ids = None

    def _take(self) -> inference_pb2.ConnectResponse:
        response, self._response = self._response, inference_pb2.ConnectResponse()
        self._size = 0
        return response


def _is_plain(event: Event) -> bool:
    return bool(event.token_ids) and not (
        event.first
        or event.logprobs
        or event.prompt_logprobs
        or event.finish_reason is not None
        or event.error is not None
        or event.worker_losses is not None
    )
