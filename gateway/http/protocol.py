"""HTTP connections: uvicorn's protocol, with bounds on the memory and time of clients."""

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import httptools
import orjson
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import service_unavailable
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.http.errors import RequestTooSlow, error_body, error_response
from protos.errors import InvalidArgument, TriptychError, Unavailable
from protos.service.backpressure import UnreadLimits
from protos.service.logs import get_logger

# Longest request line and headers together, and most bytes in a row that belong to no body: trailers, or
# extensions of a chunk. httptools has no limit of its own.
MAX_HEAD_BYTES: Final = 64 * 1024

# Most requests of a connection that may wait for the answer to the one before them.
MAX_PIPELINED: Final = 100

_RETRY_AFTER_MS: Final = 1000

# Seconds between two looks at a reader that does not keep up.
_LOOK_S: Final = 1.0

# Requests that begin in one turn of the event loop; each takes about a millisecond.
_STARTS_PER_TURN: Final = 8

_CREDENTIALS: Final = frozenset({b"authorization", b"x-api-key"})

# Headers and tokens with which a client offers another protocol.
_OFFERS: Final = frozenset({b"upgrade", b"http2-settings"})


async def too_many_connections(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers 503 and closes the connection."""
    error = Unavailable("too many connections; close idle ones or retry", retry_after_ms=_RETRY_AFTER_MS)
    await error_response(error, {"connection": "close"})(scope, receive, send)


# In a request's scope: its `BodyWriter`.
_BODY_WRITER: Final = "triptych.body_writer"


class BodyWriter:
    """Writes parts of a response's body straight to the connection.

    This costs a fraction of the way through the application's layers and ASGI messages.
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: Any) -> None:
        """Writes for uvicorn's ``cycle`` of a request and its response."""
        self._cycle = cycle

    @staticmethod
    def from_scope(scope: Scope) -> "BodyWriter | None":
        """Returns the writer of a request's response; ``None`` on servers other than ours."""
        writer: BodyWriter | None = scope.get(_BODY_WRITER)
        return writer

    def is_ready(self) -> bool:
        """Returns whether a part can be written now: the body has begun, and the client reads it."""
        cycle = self._cycle
        return bool(
            cycle.chunked_encoding
            and not (cycle.response_complete or cycle.disconnected or cycle.flow.write_paused)
        )

    def write(self, part: bytes) -> None:
        """Writes a part, which is not empty, while :meth:`is_ready`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


class PacedStarts:
    """Begins a few requests in each turn of the event loop, so that a burst delays no running stream.

    Credentials take turns, so that a tenant's burst delays no other tenant's request.
    """

    def __init__(self) -> None:
        self._waiting: dict[bytes, deque[Callable[[], None]]] = {}
        # A pipelined request is added in the context of the request before, which must not reach others.
        self._context = contextvars.copy_context()

    def add(self, credential: bytes, start: Callable[[], None]) -> None:
        """Calls ``start`` in the loop's next turn, or later if many requests wait."""
        if not self._waiting:
            self._call_soon()
        self._waiting.setdefault(credential, deque()).append(start)

    def _turn(self) -> None:
        for _ in range(_STARTS_PER_TURN):
            if not self._waiting:
                return
            credential = next(iter(self._waiting))
            waiting = self._waiting.pop(credential)
            waiting.popleft()()
            if waiting:
                self._waiting[credential] = waiting
        if self._waiting:
            self._call_soon()

    def _call_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._turn, context=self._context)


class DecliningParser:
    """httptools' parser, deaf to offers of another protocol.

    Clients with a preference for HTTP/2, such as Java's, offer it in their first request and accept HTTP/1.1.
    httptools would take the bytes after such a head for the other protocol: the request would lose its body,
    and the body could pass for further requests.
    """

    def __init__(self, make: Callable[[], Any], head: Callable[[], bytes]) -> None:
        """Parses with the parsers of ``make``; ``head`` returns the newest head without its offer."""
        self._make = make
        self._head = head
        self._parser = make()

    @property
    def declines(self) -> bool:
        """Whether the head at hand offers another protocol, and will be read again without its offer."""
        return bool(self._parser.should_upgrade()) and self._parser.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:
        """Parses ``data``."""
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                if not self.declines:
                    raise httptools.HttpParserError("CONNECT") from None
                head, rest = self._head(), data[offer.args[0] :]
                self._parser = self._make()
                data = head + rest
            else:
                return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)


def _credential(scope: Scope) -> bytes:
    """Returns the request's key as it was sent; empty if it has none."""
    return next((value for name, value in scope["headers"] if name in _CREDENTIALS), b"")


def _head_without_offer(
    method: bytes, target: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]
) -> bytes:
    lines = [b"%b %b HTTP/%b" % (method, target, version.encode())]
    for name, value in headers:
        if name == b"connection":
            kept = [token for token in value.split(b",") if token.strip().lower() not in _OFFERS]
            lines += [b"connection: " + b",".join(kept)] if kept else []
        elif name not in _OFFERS:
            lines.append(name + b": " + value)
    return b"\r\n".join(lines) + b"\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """Closes connections of clients that send a head, or read an answer, too slowly.

    A slow reader is cut off only if the transport's buffer stays above its high-water mark for the whole
    time. The application then sees a disconnect and aborts the request.
    """

    def __init__(
        self,
        *args: Any,
        read_timeout_s: float,
        write_timeout_s: float,
        unread: UnreadLimits,
        starts: PacedStarts,
        **kwargs: Any,
    ) -> None:
        """Prepares the connection.

        Args:
            *args: uvicorn's arguments.
            read_timeout_s: how long a client may take to send a request's head.
            write_timeout_s: how long unsent bytes may wait for a slow reader.
            unread: bounds the unsent bytes of all slow readers.
            starts: paces new requests of all connections.
            **kwargs: uvicorn's arguments.
        """
        super().__init__(*args, **kwargs)
        self._read_timeout_s = read_timeout_s
        self._write_timeout_s = write_timeout_s
        self._in_head = True
        self._in_body = False
        # Bytes received since the last advance, and those of them in complete headers.
        self._head_bytes = 0
        self._header_bytes = 0
        # Whether the bytes at hand ended a head or brought a part of a body.
        self._advanced = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        # Bytes that the client had not read when it last read, and the loop's time then.
        self._left, self._read_s = 0, 0.0
        self._unread = unread.reader(self._cut_off)
        self._starts = starts
        # Of the request that is being answered. uvicorn has only that of the newest one.
        self._running: Any = None
        self.parser: Any = DecliningParser(self._new_parser, self._plain_head)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        """Starts the time for the first head."""
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops all timers, and tells the request that is being answered."""
        self._stop_head_timer()
        self._stop_write_timer()
        self._unread.close()
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Parses ``data``; refuses a head, or trailers, that grow too long."""
        was_in_head, self._advanced = self._in_head, False
        super().data_received(data)
        if was_in_head == self._in_head and not self._advanced:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(b"431 Request Header Fields Too Large")

    def send_400_response(self, msg: str) -> None:
        """Answers malformed HTTP in the form of the API's errors, and closes the connection."""
        if self.transport.is_closing():
            return
        running = self._running
        if running is not None and running.response_started and not running.response_complete:
            self.transport.abort()  # nothing may be written into an answer
            return
        body = orjson.dumps(
            error_body(InvalidArgument(f"{msg.removesuffix('.')}; send HTTP 1.1 as RFC 9112 has it"))
        )
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nx-content-type-options: nosniff\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
        )
        self.transport.close()

    def on_message_begin(self) -> None:
        """Starts the time for a head."""
        super().on_message_begin()
        # The part of the head that came with the end of another request is not counted.
        self._in_head, self._head_bytes, self._header_bytes = True, 1, 0
        self._start_head_timer()

    def on_url(self, url: bytes) -> None:
        """Takes a part of the request's target."""
        super().on_url(url)
        if len(self.url) > MAX_HEAD_BYTES:
            self._refuse(b"414 URI Too Long")
            raise httptools.HttpParserError("long target")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header; drops trailers, which could pass for headers checked by a proxy."""
        self._header_bytes += len(name) + len(value) + len(b": \r\n")
        if self._header_bytes + len(self.url) > MAX_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")
            raise httptools.HttpParserError("long headers")
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Ends the time for the head. Cuts off a client with too many unanswered requests."""
        if self.parser.declines:
            return
        self._in_head, self._in_body = False, True
        self._advanced, self._head_bytes, self._header_bytes = True, 0, 0
        self._stop_head_timer()
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.abort()

    def on_body(self, body: bytes) -> None:
        """Takes a part of a body."""
        self._advanced, self._head_bytes = True, 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends the time for an unread body."""
        if self.parser.declines:
            return
        self._in_body = False
        self._stop_head_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Starts the time for the rest of a body after its answer, and drops what is there."""
        done = self._running  # the next request begins within the call
        super().on_response_complete()
        # A refused body may have begun to arrive.
        done.body = bytearray()
        if self._in_body and not self.transport.is_closing():
            self._start_head_timer()

    def pause_writing(self) -> None:
        """Starts the time for a slow reader."""
        super().pause_writing()
        if self._write_timer is None:
            self._left, self._read_s = self.transport.get_write_buffer_size(), self.loop.time()
            self._start_write_timer()

    def resume_writing(self) -> None:
        """Ends the time for a slow reader."""
        super().resume_writing()
        self._stop_write_timer()

    def _new_parser(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        # As uvicorn's: a client may close its side before it has the answer.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _plain_head(self) -> bytes:
        parser = self.parser
        return _head_without_offer(parser.get_method(), self.url, parser.get_http_version(), self.headers)

    def _start_asgi_task(self, cycle: Any, app: ASGIApp) -> None:  # type: ignore[override] # as uvicorn's
        self._running = cycle
        cycle.scope[_BODY_WRITER] = BodyWriter(cycle)
        # uvicorn's own answer at its limit is neither JSON nor has it Retry-After.
        if app is service_unavailable:
            app = too_many_connections
        self._starts.add(_credential(cycle.scope), partial(super()._start_asgi_task, cycle, app))  # type: ignore[arg-type] # uvicorn's and Starlette's ASGI types differ

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._read_timeout_s, self._on_late_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _start_write_timer(self) -> None:
        self._write_timer = self.loop.call_later(min(_LOOK_S, self._write_timeout_s), self._on_slow_reader)

    def _stop_write_timer(self) -> None:
        self._unread.set(0)
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    @property
    def _is_answering(self) -> bool:
        cycle: Any = self.cycle  # None until the first request, whatever its annotation says
        return cycle is not None and not cycle.response_complete

    def _on_late_head(self) -> None:
        self._head_timer = None
        if self._is_answering:
            # The late head belongs to a pipelined request; the answer to the one before goes on.
            self._start_head_timer()
        else:
            self._refuse(b"408 Request Timeout")

    def _refuse(self, status: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_answering or self._in_body or not self._head_bytes:
            # Nothing may be written into an answer or behind it; a client that has sent nothing expects none.
            self.transport.abort()
            return
        self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()

    def _on_slow_reader(self) -> None:
        left, now = self.transport.get_write_buffer_size(), self.loop.time()
        if left < self._left:
            self._left, self._read_s = left, now
        elif now - self._read_s >= self._write_timeout_s:
            self._cut_off(RequestTooSlow(f"it read nothing for {self._write_timeout_s:g} s"))
            return
        self._start_write_timer()
        # Not earlier: a quick reader takes a large answer in less.
        self._unread.set(left)

    def _cut_off(self, error: TriptychError) -> None:
        self._stop_write_timer()
        get_logger().warning("cut off a client that does not read", reason=str(error))
        self.transport.abort()
