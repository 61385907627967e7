"""Request bodies: bounds on their size and the time they take, and their content encodings."""

import asyncio
import contextlib
import zlib
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from gateway.http.errors import ENCODINGS, ClientGone, PayloadTooLarge, RequestTooSlow, UnsupportedEncoding
from protos.errors import InvalidArgument

# Bytes of an oversized body that are read and discarded, as a multiple of the limit, and the time for it.
_DISCARD_FACTOR: Final = 8
_DISCARD_S: Final = 10

_GZIP: Final = frozenset({"gzip", "x-gzip"})
_DEFLATE: Final = "deflate"
# Encodings of one body, and parts of one gzip stream: each costs memory and time before its first byte.
_MAX_ENCODINGS: Final = 2
_MAX_MEMBERS: Final = 64


class BoundedBody:
    """Receives a request's body, decoded and bounded in size and time."""

    def __init__(self, receive: Receive, headers: Headers, max_bytes: int, timeout_s: float) -> None:
        """Bounds the bytes of a body, both as sent and decoded, and the seconds until it is complete."""
        self._receive = receive
        self._headers = headers
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._decoders: list[_Decoder] | None = None
        self._received = 0
        self._complete = False

    async def __call__(self) -> Message:
        """Returns the next message. The first call checks the headers, after the check of keys."""
        if self._complete:
            return await self._receive()
        if self._decoders is None:
            self._decoders = await self._begin()
        message = await self._next()
        body, more = message.get("body", b""), message.get("more_body", False)
        self._received += len(body)
        self._complete = not more
        try:
            if self._received > self._max_bytes:
                raise self._too_large()
            for decoder in self._decoders:
                body = decoder.feed(body)
                if not more:
                    decoder.finish()
        except InvalidArgument:
            if more:
                await self._discard()
            raise
        return {**message, "body": body}

    async def _begin(self) -> "list[_Decoder]":
        try:
            if int(self._headers.get("content-length") or 0) > self._max_bytes:
                raise self._too_large()
            return [_Decoder(name, self._max_bytes) for name in _encodings(self._headers)]
        except InvalidArgument:
            if "expect" not in self._headers:
                await self._discard()
            raise

    async def _next(self) -> Message:
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise RequestTooSlow(
                f"the body did not arrive within {self._timeout_s:g} s; send it faster, or less"
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
                    rest -= len(message.get("body", b""))
                    if not message.get("more_body"):
                        return

    def _too_large(self) -> PayloadTooLarge:
        return _too_large(self._max_bytes)


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
