"""Refuses calls without the service token."""

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc.aio

from protos.errors import Unauthenticated, abort
from protos.logs import get_logger
from protos.security.tokens import ServiceTokens
from protos.wire import Context

METADATA_KEY: Final = "authorization"

# A check says nothing that a port scan does not, and what makes it need not hold the secret. A watch needs
# it, because it takes one of the places of running calls.
_OPEN: Final = "/grpc.health.v1.Health/Check"

# A peer that tries again and again must not fill the log.
_LOG_EVERY_S: Final = 10.0


class TokenCheck(grpc.aio.ServerInterceptor):
    """Admits calls with a token of the service, and health checks."""

    def __init__(self, tokens: ServiceTokens, clock: Callable[[], float] = time.monotonic) -> None:
        """Checks for these tokens.

        Args:
            tokens: the accepted tokens.
            clock: monotonic seconds.
        """
        self._tokens = tokens
        self._clock = clock
        self._log_next_s = -_LOG_EVERY_S
        self._num_unlogged = 0
        self._log = get_logger()

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
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
        now_s = self._clock()
        if now_s < self._log_next_s:
            self._num_unlogged += 1
            return
        self._log.warning(
            "call_refused", method=method, peer=peer, reason=f"the call {fault}", unlogged=self._num_unlogged
        )
        self._log_next_s, self._num_unlogged = now_s + _LOG_EVERY_S, 0
