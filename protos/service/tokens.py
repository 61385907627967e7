"""The service token, a secret shared by the services of a deployment: sent with calls and checked."""

import hmac
import re
import time
from pathlib import Path
from typing import Final

import grpc.aio

from protos.errors import ConfigurationRefused, Context, Unauthenticated, abort
from protos.service.grpc_options import Continuation, Handler
from protos.service.logs import get_logger
from protos.service.private_files import read_secret
from protos.service.tls import WatchedFiles

# What gRPC's metadata can carry, without spaces. Short ones could be guessed.
_TOKEN: Final = re.compile(rb"[!-~]{16,512}")
_RULE: Final = "a token has 16 to 512 printable ASCII characters and no spaces"

_SCHEME: Final = "Bearer "


class ServiceTokens:
    """A service's accepted tokens; it sends the first."""

    def __init__(self, *, token: str | None = None, file: Path | None = None) -> None:
        """Takes a token, or watches a file with a token per line. No refusal shows a token."""
        self._fixed = (_checked(token.encode(), "--service-token"),) if token is not None else ()
        self._file = WatchedFiles((file,), lambda: _read(file)) if file is not None else None

    @property
    def authorization(self) -> str:
        """The value of the `authorization` metadata of calls."""
        return _SCHEME + self._current()[0].decode()

    def accepts(self, authorization: str) -> bool:
        """Whether metadata contains an accepted token; compares in constant time."""
        given = authorization.removeprefix(_SCHEME).encode()
        matches = [hmac.compare_digest(given, token) for token in self._current()]
        return any(matches) and authorization.startswith(_SCHEME)

    def _current(self) -> tuple[bytes, ...]:
        return self._file.get() if self._file is not None else self._fixed


def _read(file: Path) -> tuple[bytes, ...]:
    flag = "--service-token-file"
    lines = [line.strip() for line in read_secret(file, flag).splitlines()]
    tokens = [line for line in lines if line and not line.startswith(b"#")]
    if not tokens:
        raise ConfigurationRefused(f"{flag}: {file} has no token; write one a line")
    return tuple(_checked(token, f"{flag}: a line of {file}") for token in tokens)


def _checked(token: bytes, where: str) -> bytes:
    if not _TOKEN.fullmatch(token):
        raise ConfigurationRefused(f"{where} is not a valid token: {_RULE}")
    return token


METADATA_KEY: Final = "authorization"

# A check says nothing that a port scan does not, and what makes it need not hold the secret. A watch needs
# it, because it takes one of the places of running calls.
_OPEN: Final = "/grpc.health.v1.Health/Check"

# A peer that tries again and again must not fill the log.
_LOG_EVERY_S: Final = 10.0


class TokenCheck(grpc.aio.ServerInterceptor):
    """Admits calls with a token of the service, and health checks."""

    def __init__(self, tokens: ServiceTokens) -> None:
        self._tokens = tokens
        self._log_next_s = -_LOG_EVERY_S
        self._num_unlogged = 0
        self._log = get_logger()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Returns the method's handler, or a refusing handler."""
        method = str(handler_call_details.method)
        if method == _OPEN:
            return await continuation(handler_call_details)
        given = next(
            (value for key, value in handler_call_details.invocation_metadata or () if key == METADATA_KEY),
            None,
        )
        if given is not None and self._tokens.accepts(str(given)):
            return await continuation(handler_call_details)
        fault = "has no service token" if given is None else "has another service token"

        async def refuse(_: object, context: Context) -> None:
            self._log_refusal(method, context.peer(), fault)
            await abort(
                context,
                Unauthenticated(
                    f"{method[1:]}: the call {fault}; set --service-token-file or TRIPTYCH_SERVICE_TOKEN to the"
                    " token of the service that is called"
                ),
            )

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _log_refusal(self, method: str, peer: str, fault: str) -> None:
        now_s = time.monotonic()
        if now_s < self._log_next_s:
            self._num_unlogged += 1
            return
        self._log.warning(
            "call_refused", method=method, peer=peer, reason=f"the call {fault}", unlogged=self._num_unlogged
        )
        self._log_next_s, self._num_unlogged = now_s + _LOG_EVERY_S, 0
