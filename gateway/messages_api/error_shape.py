"""Errors in the form of Anthropic's API.

Its clients know the status 529 as the one of a service that is overloaded for a moment, and its type names
what to do: wait and retry.
"""

from typing import Any, Final

from gateway.http.errors import Forbidden, PayloadTooLarge, ShapedError, Unauthorized
from protos.errors import InvalidArgument, NotFound, Overloaded, TimedOut, TriptychError, Unavailable
from protos.logs import request_id

_OVERLOADED_STATUS: Final = 529

# Looked up along a class' bases, as the table of OpenAI's errors.
_TYPES: Final[dict[type[TriptychError], str]] = {
    InvalidArgument: "invalid_request_error",
    PayloadTooLarge: "request_too_large",
    Unauthorized: "authentication_error",
    Forbidden: "permission_error",
    NotFound: "not_found_error",
    Overloaded: "rate_limit_error",
    Unavailable: "overloaded_error",
    TimedOut: "overloaded_error",
    TriptychError: "api_error",
}


def type_of(error: TriptychError) -> str:
    """Returns Anthropic's type of an error."""
    return next(_TYPES[cls] for cls in type(error).__mro__ if cls in _TYPES)


def error_body(error: TriptychError) -> dict[str, Any]:
    """Returns Anthropic's error object."""
    body = {"type": "error", "error": {"type": type_of(error), "message": error.message}}
    return {**body, "request_id": request_id()}


def shape(error: TriptychError) -> ShapedError:
    """Returns status, body and headers of an error."""
    overloaded = isinstance(error, Unavailable | TimedOut)
    return ShapedError(
        _OVERLOADED_STATUS if overloaded else error.http_status,
        error_body(error),
        {"request-id": request_id()},
    )
