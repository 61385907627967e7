"""The bound on calls that a gRPC server runs at once."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc.aio

from protos.errors import Overloaded, abort
from protos.wire import Context

# Short, and needed to tell a busy server from a dead one.
_EXEMPT: Final = "/grpc.health.v1.Health/Check"

_RETRY_AFTER_MS: Final = 1000


class CallLimit(grpc.aio.ServerInterceptor):
    """Refuses calls above a number, with a typed error and the setting's name.

    The server's own ``maximum_concurrent_rpcs`` would refuse them without a reason.
    """

    def __init__(self, max_calls: int) -> None:
        """Counts from 0.

        Args:
            max_calls: calls that may run at once; ``--max-concurrent-rpcs`` of the services.
        """
        self._max_calls = max_calls
        self._running = 0

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Returns the method's handler, or a refusing handler."""
        if handler_call_details.method != _EXEMPT:
            if self._running >= self._max_calls:
                return grpc.stream_stream_rpc_method_handler(self._refuse)
            self._running += 1
            # The task runs the interceptors and then the method, so it ends with the call. A wrapper around
            # the method would cost time for each message.
            task = asyncio.current_task()
            assert task is not None
            task.add_done_callback(self._on_end)
        return await continuation(handler_call_details)

    def _on_end(self, _: object) -> None:
        self._running -= 1

    async def _refuse(self, _: object, context: Context) -> None:
        await abort(
            context,
            Overloaded(
                f"{self._max_calls} calls are running at once; retry later, or raise --max-concurrent-rpcs",
                retry_after_ms=_RETRY_AFTER_MS,
            ),
        )
