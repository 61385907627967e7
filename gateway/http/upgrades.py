"""Offers of another protocol, which are declined: clients that would rather speak HTTP/2 get HTTP/1.1.

Java's client makes this offer with every first request. httptools takes what follows such a head for the
other protocol: the request would lose its body, and the body could pass for further requests.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

import httptools

_OFFERS: Final = frozenset({b"upgrade", b"http2-settings"})


class DecliningParser:
    """httptools' parser, which reads a request that offers another protocol as one that does not."""

    def __init__(self, make: Callable[[], Any], head: Callable[[], bytes]) -> None:
        """Creates a parser.

        Args:
            make: makes a parser of httptools.
            head: returns the head of the newest request without its offer.
        """
        self._make = make
        self._head = head
        self._parser = make()

    @property
    def declines(self) -> bool:
        """Whether the head at hand offers another protocol, and will be read again without its offer."""
        return bool(self._parser.should_upgrade()) and self._parser.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:
        """Parses ``data``.

        Raises:
            HttpParserError: if it is not HTTP, or asks for a tunnel.
        """
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


def head_without_offer(
    method: bytes, target: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]
) -> bytes:
    """Returns a request's head without its offer of another protocol.

    Args:
        method: the method.
        target: what the request line has between method and version.
        version: the version, for example "1.1".
        headers: names in lower case, and values.
    """
    lines = [b"%b %b HTTP/%b" % (method, target, version.encode())]
    for name, value in headers:
        if name == b"connection":
            kept = [token for token in value.split(b",") if token.strip().lower() not in _OFFERS]
            lines += [b"connection: " + b",".join(kept)] if kept else []
        elif name not in _OFFERS:
            lines.append(name + b": " + value)
    return b"\r\n".join(lines) + b"\r\n\r\n"
