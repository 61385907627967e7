"""HTTP errors, and the table of their types and codes in OpenAI's form.

::

    TriptychError (protos.errors)
    ├── InvalidArgument
    │   ├── PayloadTooLarge
    │   ├── RequestTooSlow
    │   ├── UnsupportedEncoding
    │   ├── Unauthorized
    │   └── Forbidden
    ├── NotFound
    │   ├── UnknownModel
    │   └── UnknownRoute
    │       └── WrongMethod
    └── Aborted
        └── ClientGone
"""

import math
from collections.abc import Callable, MutableMapping
from typing import Annotated, Any, Final, NamedTuple

import orjson
from pydantic import Field
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict

from protos.errors import (
    Aborted,
    ContextExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    Overloaded,
    TimedOut,
    TriptychError,
    Unavailable,
    Unimplemented,
    Unsupported,
)

_ERROR: Final = "triptych.error"

METHOD: Final = "triptych.method"
"""The client's method, in a request's scope; routes see HEAD as GET."""

# The Retry-After value, in seconds, if the error has none of its own.
DEFAULT_RETRY_AFTER_S: Final = 1

ENCODINGS: Final = "gzip, deflate"
"""The content encodings in which bodies are taken."""


class PayloadTooLarge(InvalidArgument):
    """The body is longer than this gateway accepts."""

    http_status = 413


class RequestTooSlow(InvalidArgument):
    """The body did not arrive in time."""

    http_status = 408


class UnsupportedEncoding(InvalidArgument):
    """The content encoding of the body is not served."""

    http_status = 415


class Unauthorized(InvalidArgument):
    """A key is missing or wrong."""

    http_status = 401


class Forbidden(InvalidArgument):
    """A setting does not allow the request."""

    http_status = 403


class UnknownModel(NotFound):
    """The request names an unknown model."""


class UnknownRoute(NotFound):
    """No such path."""


class WrongMethod(UnknownRoute):
    """The path exists, the method does not."""

    http_status = 405


class ClientGone(Aborted):
    """The client closed its connection."""


class Row(NamedTuple):
    """An error class' entry in OpenAI's error body."""

    type: str
    code: str | None


# Looked up along a class' bases: the most specific row wins. The HTTP status comes from the class itself.
TABLE: Final[dict[type[TriptychError], Row]] = {
    InvalidArgument: Row("invalid_request_error", "invalid_value"),
    Unsupported: Row("invalid_request_error", "unsupported_parameter"),
    ContextExceeded: Row("invalid_request_error", "context_length_exceeded"),
    PayloadTooLarge: Row("invalid_request_error", "payload_too_large"),
    RequestTooSlow: Row("invalid_request_error", "request_timeout"),
    UnsupportedEncoding: Row("invalid_request_error", "unsupported_content_encoding"),
    Unauthorized: Row("invalid_request_error", "invalid_api_key"),
    Forbidden: Row("invalid_request_error", "forbidden"),
    NotFound: Row("invalid_request_error", "not_found"),
    UnknownModel: Row("invalid_request_error", "model_not_found"),
    WrongMethod: Row("invalid_request_error", "method_not_allowed"),
    Overloaded: Row("rate_limit_error", "rate_limit_exceeded"),
    Unavailable: Row("service_unavailable_error", "service_unavailable"),
    TimedOut: Row("service_unavailable_error", "request_timed_out"),
    Unimplemented: Row("invalid_request_error", "not_implemented"),
    Aborted: Row("aborted_error", "request_aborted"),
    TriptychError: Row("server_error", "internal_error"),
}


def row_of(error: TriptychError) -> Row:
    """Returns the table's row for ``error``."""
    if isinstance(error, NotFound) and error.param == "model":
        return TABLE[UnknownModel]
    return next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)


def error_body(error: TriptychError) -> dict[str, Any]:
    """Returns OpenAI's error object for ``error``."""
    row = row_of(error)
    return {
        "error": {
            "message": error.message,
            "type": row.type,
            "param": error.param or None,
            "code": row.code,
        }
    }


class ShapedError(NamedTuple):
    """An error in the form of a protocol other than OpenAI's."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]


ErrorShape = Callable[[TriptychError], ShapedError]

# The shapes of errors below a path, for protocols other than OpenAI's.
_SHAPES: Final[dict[str, ErrorShape]] = {}


def shape_errors(prefix: str, shape: ErrorShape) -> None:
    """Gives ``prefix`` and all paths below it another form of error, even where no route is reached."""
    _SHAPES[prefix] = shape


def shape_for(path: str) -> ErrorShape:
    """Returns the function that shapes the errors of ``path``: OpenAI's, unless there is another."""
    for prefix, shape in _SHAPES.items():
        # The path may begin with the prefix of a proxy (--root-path).
        if path.endswith(prefix) or f"{prefix}/" in path:
            return shape
    return _openai_shape


def _openai_shape(error: TriptychError) -> ShapedError:
    return ShapedError(error.http_status, error_body(error), {})


def error_response(
    error: TriptychError, headers: dict[str, str] | None = None, *, path: str = ""
) -> Response:
    """Returns the HTTP response for ``error``.

    Retry-After says when a retry makes sense. X-Should-Retry tells OpenAI's clients when it makes none: they
    would otherwise retry every 5xx and 408.
    """
    headers = dict(headers or {})
    if error.retryable:
        headers["retry-after"] = str(math.ceil(error.retry_after_ms / 1000) or DEFAULT_RETRY_AFTER_S)
    else:
        headers["x-should-retry"] = "false"
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, UnsupportedEncoding):
        headers["accept-encoding"] = ENCODINGS
    if isinstance(error, PayloadTooLarge | RequestTooSlow | UnsupportedEncoding):
        # The rest of the body stays unread, so the connection cannot be reused.
        headers["connection"] = "close"
    shaped = shape_for(path)(error)
    return _ErrorResponse(error, orjson.dumps(shaped.body), shaped.status, headers | shaped.headers)


class _ErrorResponse(Response):
    """An answer whose error is noted for the middleware."""

    media_type = "application/json"

    def __init__(self, error: TriptychError, body: bytes, status: int, headers: dict[str, str]) -> None:
        super().__init__(body, status, headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        note_error(scope, self._error)
        await super().__call__(scope, receive, send)


def note_error(scope: MutableMapping[str, Any], error: TriptychError) -> None:
    """Notes the error at a request's end, for the access log and metrics."""
    row = row_of(error)
    scope[_ERROR] = row.code or row.type


def error_code(scope: MutableMapping[str, Any]) -> str | None:
    """Returns the code of the error at a request's end."""
    code: str | None = scope.get(_ERROR)
    return code


def internal(error: BaseException) -> Internal:
    """Returns the client's view of an unexpected exception; the log keeps the details."""
    return Internal(f"the gateway failed on this request ({type(error).__name__}); its log has the details")


def sent_method(scope: MutableMapping[str, Any]) -> str:
    """Returns the client's method."""
    method: str = scope.get(METHOD, scope["method"])
    return method


class ErrorDetail(TypedDict):
    """OpenAI's error object."""

    message: Annotated[str, Field(description="One line: what was wrong, and what to change.")]
    type: Annotated[str, Field(description="OpenAI's error type, for example invalid_request_error.")]
    param: Annotated[str | None, Field(description="The parameter at fault.")]
    code: Annotated[
        str | None, Field(description="OpenAI's error code, for example context_length_exceeded.")
    ]


class ErrorAnswer(TypedDict):
    """The body of every answer with an error status."""

    error: ErrorDetail
