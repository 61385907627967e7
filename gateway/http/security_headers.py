"""Headers that tell browsers what they may do with an answer."""

from collections.abc import Sequence
from typing import Final

RawHeaders = Sequence[tuple[bytes, bytes]]

_ALWAYS: Final = (
    # A browser must not read JSON with a prompt in it as a page.
    (b"x-content-type-options", b"nosniff"),
)

# Pages load what this gateway serves and nothing else, and no other site shows them in a frame. Pages of API
# documentation have a script and styles of their own in them.
_PAGES: Final = (
    (
        b"content-security-policy",
        (
            b"default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline';"
            b" img-src 'self' data:; worker-src 'self' blob:; object-src 'none'; base-uri 'none';"
            b" form-action 'none'; frame-ancestors 'none'"
        ),
    ),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
)


def security_headers(given: RawHeaders) -> RawHeaders:
    """Returns the headers to add to an answer. A page's own policy stays.

    Args:
        given: the answer's headers, names in lower case.
    """
    found = dict(given)
    if not found.get(b"content-type", b"").startswith(b"text/html"):
        return _ALWAYS
    return (*_ALWAYS, *(header for header in _PAGES if header[0] not in found))
