"""Events on their way to a client: buffered for the writer of its stream, and written in columns."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from protos.errors import TriptychError
from protos.service.backpressure import UnreadLimits
from protos.service.grpc_options import FULL_MESSAGE_BYTES
from protos.triptych.v1 import inference_pb2
from scheduler_svc.api.messages import event_to_protos
from scheduler_svc.requests.request import Event, TokenColumns
from scheduler_svc.requests.sampling import FinishReason

# Most buffered tokens before the reader of a stream stops accepting requests.
_MAX_BUFFERED: Final = 4096

# Most tokens taken by a writer at a time. It holds them while a client does not read, so the writer of an
# ended stream must not have taken everything.
_MOST_TAKEN: Final = 16_384


class EventBuffer:
    """Collects the events of a client's requests, for the writer of its stream.

    Code that adds events in answer to client messages must wait for :meth:`has_room` first.
    """

    def __init__(
        self,
        limits: UnreadLimits,
        abort: Callable[[], None],
        count_loss: Callable[[TriptychError | None], None] = lambda _: None,
    ) -> None:
        """Starts empty.

        `abort` aborts the client's requests when it reads too slowly; `count_loss` counts failed requests,
        given their error, and aborted sequences.
        """
        self._count_loss = count_loss
        self._abort = abort
        self._unread = limits.reader(self.end)
        self._error: TriptychError | None = None
        self._events: list[Event | TokenColumns] = []
        self._num_buffered = 0
        self._num_taken = 0
        self._filled = asyncio.Event()
        self._taken = asyncio.Event()

    def push(self, event: Event) -> None:
        """Adds an event."""
        if event.error is not None or event.finish_reason is FinishReason.ABORT:
            self._count_loss(event.error)
        self._add(event, _weight(event))

    def refuse(self, request_id: str, error: TriptychError) -> None:
        """Adds the event of a refused request."""
        self._add(Event(request_id, error=error), 1)

    def push_tokens(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        """Adds a plain token for each request, as a single entry."""
        self._add((request_ids, token_ids), len(token_ids))

    def _add(self, event: Event | TokenColumns, weight: int) -> None:
        if self._error is not None:
            return
        if not self._events:
            self._filled.set()
        self._events.append(event)
        self._num_buffered += weight
        self._unread.add(weight)

    def end(self, error: TriptychError) -> None:
        """Aborts the requests and drops all events; :meth:`take` and :meth:`has_room` raise `error`."""
        self._error = error
        self._events.clear()
        self._num_buffered = 0
        self._filled.set()
        self._taken.set()
        self._abort()

    def wake(self) -> None:
        """Makes :meth:`take` return, even without events."""
        self._filled.set()

    async def take(self) -> list[Event | TokenColumns]:
        """Waits for events or :meth:`wake`, and takes all events, or as many as a writer may hold.

        Those taken before count as read.

        Raises:
            Overloaded: the client reads too slowly. Its requests are aborted.
            TriptychError: the error given to :meth:`end`.
        """
        self._unread.remove(self._num_taken)
        self._num_taken = 0
        await self._filled.wait()
        if self._error is not None:
            raise self._error
        events, self._events = self._events, []
        if self._num_buffered > _MOST_TAKEN:
            count = 0
            while self._num_taken <= _MOST_TAKEN and count < len(events):
                self._num_taken += _weight(events[count])
                count += 1
            events, self._events = events[:count], events[count:]
        else:
            self._num_taken = self._num_buffered
        self._num_buffered -= self._num_taken
        if not self._events:
            self._filled.clear()
        self._taken.set()
        return events

    async def has_room(self) -> None:
        """Waits for the client to read most of its events; raises as :meth:`take` does."""
        while self._num_buffered > _MAX_BUFFERED:
            self._taken.clear()
            await self._taken.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Ends the count of unread output at the end of the stream."""
        self._unread.close()


def _weight(event: Event | TokenColumns) -> int:
    """Returns the tokens of an event, at least 1, and its log-probabilities."""
    if isinstance(event, tuple):
        return len(event[1])
    entries = (*event.logprobs, *event.prompt_logprobs) if event.logprobs or event.prompt_logprobs else ()
    return max(1, len(event.token_ids)) + sum(1 + len(entry.top_token_ids) for entry in entries)


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
        for message in event_to_protos(event):
            num_bytes = message.ByteSize()
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
