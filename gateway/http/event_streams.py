"""Event streams: headers, comments, and streams opened before their answer is known."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.http.errors import ClientGone, internal, note_error
from gateway.http.middleware import note
from protos.errors import TriptychError
from protos.service.logs import get_logger

EVENT_STREAM: Final = "text/event-stream; charset=utf-8"
KEEP_ALIVE: Final = b": keep-alive\n\n"

STREAM_HEADERS: Final[tuple[tuple[bytes, bytes], ...]] = (
    (b"content-type", EVENT_STREAM.encode()),
    (b"cache-control", b"no-cache"),
    # Proxies (nginx) otherwise buffer the stream.
    (b"x-accel-buffering", b"no"),
)


def encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Returns headers in the form of ASGI."""
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def as_stream_error(error: Exception) -> TriptychError:
    """Logs the failure of a stream after its start; returns the client's view of it."""
    if isinstance(error, TriptychError):
        get_logger().warning("stream failed", error=str(error), code=type(error).__name__)
        return error
    get_logger().exception("stream failed")
    return internal(error)


class EarlyStream(Response):
    """A stream of comments while no model is known, followed by the answer.

    An answer or refusal before the first comment keeps its own status and headers.
    """

    def __init__(
        self,
        answer: Coroutine[Any, Any, Response],
        every_s: float,
        write_error: Callable[[TriptychError], bytes],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Prepares the stream.

        Args:
            answer: returns the response to the request, a stream.
            every_s: seconds between two comments.
            write_error: writes the last events of a failed stream.
            headers: further headers, known before the answer.
        """
        super().__init__(status_code=200)
        self._answer = answer
        self._every_s = every_s
        self._write_error = write_error
        self._more_headers = headers or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Waits for the answer, and sends it."""
        answer = asyncio.create_task(self._answer, name="early-stream")
        began = False
        try:
            while not (await asyncio.wait((answer,), timeout=self._every_s))[0]:
                if not began:
                    began = True
                    headers = [*STREAM_HEADERS, *encoded(self._more_headers)]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await _send_part(send, KEEP_ALIVE)
            if began:
                await self._send_rest(answer, scope, receive, send)
            else:
                await answer.result()(scope, receive, send)
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)

    async def _send_rest(
        self, answer: asyncio.Task[Response], scope: Scope, receive: Receive, send: Send
    ) -> None:
        async def without_head(message: Message) -> None:
            if message["type"] != "http.response.start":
                await send(message)

        try:
            await answer.result()(scope, receive, without_head)
        except ClientGone:
            note(scope, client_gone=True)
        except Exception as error:  # noqa: BLE001 - as_stream_error logs it
            seen = as_stream_error(error)
            note_error(scope, seen)
            await send({"type": "http.response.body", "body": self._write_error(seen), "more_body": False})


async def _send_part(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})
