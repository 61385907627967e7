"""Failures between services.

::

    TriptychError
    ├── InvalidArgument        the request can never succeed as written
    │   ├── Unsupported        a parameter of the schema, unserved by this build
    │   └── ContextExceeded    prompt, or prompt plus output, beyond the context
    ├── NotFound               no such model, adapter or request
    ├── Overloaded             queues are full; retry later
    ├── Unavailable            no replica is ready; retry later
    ├── TimedOut               the request waited longer than a setting allows; retry later
    ├── Unauthenticated        the call lacks the service token of the peer
    ├── SchemaMismatch         the two ends were built from different schemas
    ├── ConfigurationRefused   settings unfit for each other or for this device
    ├── Unimplemented          a method unserved by this build
    ├── Aborted                aborted by the client, a closed stream or a deadline
    └── Internal               a bug or a fault inside Triptych
        └── NotFinite          the model computed NaN or infinity for the request

Every class has its code in ``triptych.v1.ErrorCode``, its gRPC status and its HTTP status. An error travels
as a ``triptych.v1.Error``: inline on streams that carry many requests, otherwise as a detail of the call's
status. Clients of gRPC lose a status above 8 KiB by default, so its texts take at most 2 KiB together;
services accept longer texts from other services.
"""

import contextlib
import sys
from typing import Any, ClassVar, Final, NoReturn, TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from grpc_status import rpc_status

from protos.triptych.v1 import common_pb2 as pb

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""The context of a call in a servicer's method."""

MAX_METADATA_BYTES: Final = 128 * 1024
"""Longest metadata accepted from other services: a refusal may list a model's tensors."""

_MAX_STATUS_TEXT: Final = 2048
"""Bytes of a status' message and details as sent to any client."""
_MAX_SERVICE_STATUS_TEXT: Final = MAX_METADATA_BYTES // 2
"""Bytes of them as sent between services."""
_MAX_PARAM: Final = 64
"""Bytes of a parameter's name there."""
# Bytes of a status without text: the type's name, the tags, the other fields and an ellipsis, encoded.
_TEXTLESS_STATUS: Final = 256


class TriptychError(Exception):
    """A failure, with a code for programs and a line for people."""

    code: ClassVar[pb.ErrorCode.ValueType] = pb.ERROR_CODE_INTERNAL
    grpc_code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str = "", retry_after_ms: int = 0) -> None:
        """Makes an error; ``str()`` returns its message."""
        super().__init__(message)
        self.message = message
        """Cause and remedy, in a line."""
        self.param = param
        """Public name of the offending parameter; empty if there is none."""
        self.retry_after_ms = retry_after_ms
        """How long to wait before a retry, milliseconds; 0 if unknown."""

    @property
    def code_name(self) -> str:
        """The code's name in logs and metrics, such as ``not_found``."""
        return pb.ErrorCode.Name(self.code).removeprefix("ERROR_CODE_").lower()

    def to_proto(self) -> pb.Error:
        """Returns the message that travels between services."""
        return pb.Error(
            code=self.code,
            message=self.message,
            retryable=self.retryable,
            param=self.param,
            retry_after_ms=self.retry_after_ms,
        )


class InvalidArgument(TriptychError):
    """The request can never succeed as written."""

    code = pb.ERROR_CODE_INVALID_ARGUMENT
    grpc_code = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400


class Unsupported(InvalidArgument):
    """A parameter that the schema knows and this build does not serve."""

    code = pb.ERROR_CODE_UNSUPPORTED


class ContextExceeded(InvalidArgument):
    """The prompt, or the prompt and the requested tokens, exceed the context."""

    code = pb.ERROR_CODE_CONTEXT_EXCEEDED


class NotFound(TriptychError):
    """No such model, adapter or request."""

    code = pb.ERROR_CODE_NOT_FOUND
    grpc_code = grpc.StatusCode.NOT_FOUND
    http_status = 404


class Overloaded(TriptychError):
    """Queues are full."""

    code = pb.ERROR_CODE_OVERLOADED
    grpc_code = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429
    retryable = True


class Unavailable(TriptychError):
    """No replica is ready, or the peer cannot be reached."""

    code = pb.ERROR_CODE_UNAVAILABLE
    grpc_code = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    retryable = True


class TimedOut(TriptychError):
    """The request waited longer for a slot, or for a token, than the scheduler's settings allow.

    Unlike `Unavailable`, no service sends the request again by itself.
    """

    code = pb.ERROR_CODE_TIMED_OUT
    grpc_code = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 503
    retryable = True


class Unauthenticated(TriptychError):
    """The call lacks the service token of the peer.

    HTTP clients cannot help it: for them the service is unavailable until the tokens agree.
    """

    code = pb.ERROR_CODE_UNAUTHENTICATED
    grpc_code = grpc.StatusCode.UNAUTHENTICATED
    http_status = 503


class SchemaMismatch(TriptychError):
    """The peer was built from another revision of the schema."""

    code = pb.ERROR_CODE_SCHEMA_MISMATCH
    grpc_code = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 500


class ConfigurationRefused(TriptychError):
    """Settings that do not work together or on this device."""

    code = pb.ERROR_CODE_CONFIGURATION
    grpc_code = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 500


class Unimplemented(TriptychError):
    """A method that this build does not serve."""

    code = pb.ERROR_CODE_UNIMPLEMENTED
    grpc_code = grpc.StatusCode.UNIMPLEMENTED
    http_status = 501


class Aborted(TriptychError):
    """The request was aborted, its stream ended, or its deadline passed."""

    code = pb.ERROR_CODE_ABORTED
    grpc_code = grpc.StatusCode.ABORTED
    # nginx' status for a request that the client closed; no client reads it.
    http_status = 499


class Internal(TriptychError):
    """A bug or a fault inside Triptych."""


class NotFinite(Internal):
    """The model computed NaN or infinity for the request: its weights, or an adapter's, are broken."""

    code = pb.ERROR_CODE_NOT_FINITE


_BY_CODE: dict[int, type[TriptychError]] = {
    cls.code: cls
    for cls in (
        InvalidArgument, Unsupported, ContextExceeded, NotFound, Overloaded, Unavailable, TimedOut,
        Unauthenticated, SchemaMismatch, ConfigurationRefused, Unimplemented, Aborted, Internal,
        NotFinite,
    )
}  # fmt: skip


def print_end(service: str, error: Exception) -> None:
    """Prints the reason of a service's end as a line of any length. A full disk changes no exit code."""
    message = error.message if isinstance(error, TriptychError) else str(error)
    with contextlib.suppress(OSError):
        sys.stderr.write(f"triptych {service}: {' '.join(message.split())}\n")
        sys.stderr.flush()


def from_proto(error: pb.Error) -> TriptychError:
    """Returns the exception for an error message; an unknown code becomes ``Internal``."""
    cls = _BY_CODE.get(error.code, Internal)
    return cls(error.message, param=error.param, retry_after_ms=error.retry_after_ms)


def from_rpc_error(error: grpc.aio.AioRpcError) -> TriptychError:
    """Returns the exception for a failed call, from its typed detail or else from its gRPC status."""
    typed = _typed_detail(error)
    if typed is not None:
        return from_proto(typed)
    text = error.details() or error.code().name
    match error.code():
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unavailable(text)
        case grpc.StatusCode.CANCELLED:
            return Aborted(text)
        case grpc.StatusCode.UNIMPLEMENTED:
            return Unimplemented(text)
        case grpc.StatusCode.UNAUTHENTICATED:
            return Unauthenticated(text)
        case grpc.StatusCode.NOT_FOUND:
            return NotFound(text)
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "metadata" in text:
            return Internal(text)  # a status that was too long
        case grpc.StatusCode.RESOURCE_EXHAUSTED | grpc.StatusCode.INVALID_ARGUMENT:
            # Without a detail, the transport refused the message as too large or malformed.
            return InvalidArgument(text)
        case _:
            return Internal(text)


def _typed_detail(error: grpc.aio.AioRpcError) -> pb.Error | None:
    """Returns the typed detail of a status; `None` if it is missing, unreadable or of another status."""
    # A status without details comes from the transport: the peer cannot be reached.
    if not error.trailing_metadata():
        return None
    try:
        status = rpc_status.from_call(cast("grpc.Call", error))
        for detail in status.details if status else ():
            typed = pb.Error()
            if detail.Unpack(typed):
                return typed
    except (ValueError, DecodeError):
        return None
    return None


async def abort(context: Context, error: TriptychError, *, to_service: bool = False) -> NoReturn:
    """Ends a call with the error's status, message and typed detail; `to_service` allows longer messages."""
    typed = error.to_proto()
    typed.message = _shortened(typed.message, _MAX_SERVICE_STATUS_TEXT if to_service else _MAX_STATUS_TEXT)
    typed.param = typed.param.encode()[:_MAX_PARAM].decode(errors="ignore")
    detail = any_pb2.Any()
    detail.Pack(typed)
    status = status_pb2.Status(code=error.grpc_code.value[0], message=typed.message, details=[detail])
    rich = rpc_status.to_status(status)
    context.set_trailing_metadata(rich.trailing_metadata)
    await context.abort(rich.code, rich.details)
    raise AssertionError("unreachable: abort raises")


def _shortened(text: str, max_bytes: int) -> str:
    """Returns a text, or its beginning and an ellipsis, so that all its copies in a status fit."""
    # gRPC percent-encodes the message and sends the details, which hold two copies, in base64.
    left = max_bytes - _TEXTLESS_STATUS
    for end, char in enumerate(text):
        size = len(char.encode(errors="replace"))
        left -= (1 if " " <= char <= "~" and char != "%" else 3 * size) + 3 * size
        if left < 0:
            return f"{text[:end]}…"
    return text
