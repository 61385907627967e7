"""Request bodies: bounds on their size, memory and time, and their content encodings."""

import asyncio
import contextlib
import io
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from gateway.http.errors import ENCODINGS, ClientGone, PayloadTooLarge, RequestTooSlow, UnsupportedEncoding
from protos.errors import InvalidArgument, Overloaded
from protos.service.backpressure import TENANT

# Bytes of an oversized body that are read and discarded, as a multiple of the limit, and the time for it.
_DISCARD_FACTOR: Final = 8
_DISCARD_S: Final = 10

# Half-sent bodies of at most this size never wait for larger ones.
_SMALL: Final = 256 * 1024

_RETRY_AFTER_MS: Final = 1000
# Digits of a length; Python refuses to read thousands of them.
_MAX_DIGITS: Final = 20

_GZIP: Final = frozenset({"gzip", "x-gzip"})
_DEFLATE: Final = "deflate"
# Encodings of one body, and parts of one gzip stream: each costs memory and time before its first byte.
_MAX_ENCODINGS: Final = 2
_MAX_MEMBERS: Final = 64


class BodyLimits:
    """Bounds on bodies, and the bytes of all in memory. A tenant may hold as many as are free.

    So a tenant alone holds half of the total at most, and another's small body has room at all times. Large
    bodies leave a quarter to those of up to 256 KiB, and have no part in their bound.
    """

    num_bytes: int
    """Bytes of all bodies."""

    def __init__(self, max_bytes: int, total_bytes: int, timeout_s: float) -> None:
        """Bounds a body's bytes, sent and decoded, its seconds until complete, and the bytes of all.

        All have room for three of the largest bodies in any case.
        """
        self.max_bytes = max_bytes
        self.timeout_s = timeout_s
        self.num_bytes = 0
        self._total_bytes = max(total_bytes, 3 * max_bytes)
        self._held = Counter[tuple[str, bool]]()

    def resize(self, tenant: str, before: int, after: int) -> None:
        """Counts a tenant's body that has grown from ``before`` to ``after`` bytes; 0 ends the count.

        Raises:
            Overloaded: if its bodies are too many. The count stays as it was.
        """
        is_small = after <= _SMALL
        room = self._total_bytes - (0 if is_small else self._total_bytes // 4) - self.num_bytes
        self._add(tenant, -before, before <= _SMALL)
        held = self._held[tenant, is_small]
        fits = after <= before or held + after <= room
        self._add(tenant, after if fits else before, is_small if fits else before <= _SMALL)
        if not fits:
            raise Overloaded(
                f"the tenant's requests under way have bodies of {held + before} bytes, and more do not fit into"
                " memory (--max-total-body-bytes); retry when some of them are answered",
                retry_after_ms=_RETRY_AFTER_MS,
            )

    def _add(self, tenant: str, num_bytes: int, is_small: bool) -> None:
        self.num_bytes += num_bytes
        if held := self._held.pop((tenant, is_small), 0) + num_bytes:
            self._held[tenant, is_small] = held


class BoundedBody:
    """Receives a request's body as a whole, decoded and bounded in size, memory and time."""

    def __init__(
        self, receive: Receive, headers: Headers, limits: BodyLimits, tenant: Callable[[], str]
    ) -> None:
        """Counts the body until :meth:`close` as held by `tenant`, known once keys are checked."""
        self._receive = receive
        self._headers = headers
        self._limits = limits
        self._max_bytes = limits.max_bytes
        self._deadline = asyncio.get_running_loop().time() + limits.timeout_s
        self._tenant = tenant
        self._holder = ""
        self._held = 0
        self._complete = False

    async def __call__(self) -> Message:
        """Returns the whole body in one message, then the next ones. Checks the headers, after the keys."""
        if self._complete:
            return await self._receive()
        self._complete = True
        body, received, more = io.BytesIO(), 0, True
        try:
            length = self._headers.get("content-length", "0")
            if len(length) > _MAX_DIGITS:
                raise InvalidArgument(
                    f"Content-Length has {len(length)} digits; send the body's length without zeros"
                )
            if int(length) > self._max_bytes:
                raise _too_large(self._max_bytes)
            decoders = [_Decoder(name, self._max_bytes) for name in _encodings(self._headers)]
            self._holder = self._tenant()
            TENANT.set(self._holder)
            while more:
                message = await self._next()
                part, more = message.pop("body", b""), message.get("more_body", False)
                received += len(part)
                if received > self._max_bytes:
                    raise _too_large(self._max_bytes)
                for decoder in decoders:
                    part = decoder.feed(part)
                    if not more:
                        decoder.finish()
                self._limits.resize(self._holder, self._held, self._held + len(part))
                self._held += len(part)
                body.write(part)
                part = b""  # thousands of requests may wait for their next one
        except (InvalidArgument, Overloaded) as error:
            body.close()
            self.close()
            # A client that waits for the status 100 sends nothing until then.
            if more and not isinstance(error, RequestTooSlow) and (received or "expect" not in self._headers):
                await self._discard()
            raise
        return {"type": "http.request", "body": body.getvalue(), "more_body": False}

    def close(self) -> None:
        """Ends the count of the body."""
        self._limits.resize(self._holder, self._held, 0)
        self._held = 0

    async def _next(self) -> Message:
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise RequestTooSlow(
                f"the body did not arrive within {self._limits.timeout_s:g} s; send it faster, or less"
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGone("the client closed the connection before its body was complete")
        return message

    async def _discard(self) -> None:
        """Reads the rest of a body, within limits. A client cut off while sending never sees the error."""
        rest = _DISCARD_FACTOR * self._max_bytes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_S):
                while rest > 0:
                    message = await self._receive()
                    rest -= len(message.pop("body", b""))
                    if not message.get("more_body"):
                        return


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is longer than {max_bytes} bytes; send less at once")


def _encodings(headers: Headers) -> list[str]:
    given = [name.strip().lower() for name in ",".join(headers.getlist("content-encoding")).split(",")]
    found = [name for name in reversed(given) if name not in ("", "identity")]
    for name in found:
        if name not in _GZIP and name != _DEFLATE:
            raise UnsupportedEncoding(
                f"the content encoding '{name[:64]}' is not served; send {ENCODINGS} or none"
            )
    if len(found) > _MAX_ENCODINGS:
        raise UnsupportedEncoding(
            f"the body has {len(found)} content encodings; send at most {_MAX_ENCODINGS}"
        )
    return found


class _Decoder:
    """Decodes gzip (RFC 1952) or deflate (RFC 1950, or the bare RFC 1951 that some clients send)."""

    def __init__(self, name: str, max_bytes: int) -> None:
        self._name = name
        self._max_bytes = self._left = max_bytes
        self._inflater: zlib._Decompress | None = None
        self._num_members = 0

    def feed(self, data: bytes) -> bytes:
        """Returns the decoded bytes of ``data``; allocates no more than the bound."""
        out = []
        while data:
            if self._inflater is None or self._inflater.eof:
                self._inflater = self._next_member(data)
            try:
                out.append(self._inflater.decompress(data, self._left + 1))
            except zlib.error:
                raise self._broken("is damaged") from None
            self._left -= len(out[-1])
            if self._left < 0:
                raise _too_large(self._max_bytes)
            data = self._inflater.unused_data
        return b"".join(out)

    def finish(self) -> None:
        """Refuses a body whose end is missing."""
        if self._inflater is None or not self._inflater.eof:
            raise self._broken("ends too early")

    def _next_member(self, data: bytes) -> "zlib._Decompress":
        self._num_members += 1
        if self._name in _GZIP:
            if self._num_members > _MAX_MEMBERS:
                raise self._broken(f"has more than {_MAX_MEMBERS} parts")
            return zlib.decompressobj(16 + zlib.MAX_WBITS)
        if self._num_members > 1:
            raise self._broken("goes on after its end")
        has_header = data[0] & 0x0F == zlib.DEFLATED
        return zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)

    def _broken(self, reason: str) -> InvalidArgument:
        return InvalidArgument(
            f"the body {reason}, read as its content encoding '{self._name}'; send it whole, or not encoded"
        )
