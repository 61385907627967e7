"""From our error tree to HTTP: one table gives each class its status, OpenAI error type and code.

::

    TriptychError (protos.errors)
    ├── InvalidArgument
    │   └── PayloadTooLarge    the body is longer than this gateway accepts
    ├── NotFound
    │   ├── UnknownModel       the request names a model that is not served
    │   └── UnknownRoute       no such path
    │       └── WrongMethod    the path exists, the method does not
    └── Aborted
        └── ClientGone         the client closed its connection; nobody reads the answer
"""

import math
from typing import Any, Final, NamedTuple

import orjson
from starlette.responses import Response

from protos.errors import (
    Aborted,
    ContextExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    Overloaded,
    TriptychError,
    Unavailable,
    Unimplemented,
    Unsupported,
)

# What Retry-After says when the scheduler did not know better, seconds.
DEFAULT_RETRY_AFTER_S: Final = 1


class PayloadTooLarge(InvalidArgument):
    """The body is longer than this gateway accepts."""

    http_status = 413


class UnknownModel(NotFound):
    """The request names a model that is not served."""


class UnknownRoute(NotFound):
    """No such path."""


class WrongMethod(UnknownRoute):
    """The path exists, the method does not."""

    http_status = 405


class ClientGone(Aborted):
    """The client closed its connection."""


class Row(NamedTuple):
    """What OpenAI's error body says about an error class."""

    type: str
    code: str | None


# Looked up along a class' bases: the most specific row wins. The HTTP status is the class' own.
TABLE: Final[dict[type[TriptychError], Row]] = {
    InvalidArgument: Row("invalid_request_error", "invalid_value"),
    Unsupported: Row("invalid_request_error", "unsupported_parameter"),
    ContextExceeded: Row("invalid_request_error", "context_length_exceeded"),
    PayloadTooLarge: Row("invalid_request_error", "payload_too_large"),
    NotFound: Row("invalid_request_error", "not_found"),
    UnknownModel: Row("invalid_request_error", "model_not_found"),
    WrongMethod: Row("invalid_request_error", "method_not_allowed"),
    Overloaded: Row("rate_limit_error", "rate_limit_exceeded"),
    Unavailable: Row("service_unavailable_error", "service_unavailable"),
    Unimplemented: Row("invalid_request_error", "not_implemented"),
    Aborted: Row("aborted_error", "request_aborted"),
    TriptychError: Row("server_error", "internal_error"),
}


def row_of(error: TriptychError) -> Row:
    """The table's row for ``error``."""
    if isinstance(error, NotFound) and error.param == "model":
        return TABLE[UnknownModel]
    return next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)


def error_body(error: TriptychError) -> dict[str, Any]:
    """OpenAI's error object."""
    row = row_of(error)
    return {
        "error": {
            "message": error.message,
            "type": row.type,
            "param": error.param or None,
            "code": row.code,
        }
    }


def error_response(error: TriptychError, headers: dict[str, str] | None = None) -> Response:
    """The HTTP answer for ``error``, with Retry-After where a retry makes sense."""
    headers = dict(headers or {})
    if error.retryable:
        headers["retry-after"] = str(math.ceil(error.retry_after_ms / 1000) or DEFAULT_RETRY_AFTER_S)
    if isinstance(error, PayloadTooLarge):
        # The rest of the body is not read; the connection cannot be used again.
        headers["connection"] = "close"
    return Response(orjson.dumps(error_body(error)), error.http_status, headers, "application/json")


def internal(error: BaseException) -> Internal:
    """What a client is told about an exception nobody expected; details stay in the log."""
    return Internal(f"the gateway failed on this request ({type(error).__name__}); its log has the details")
