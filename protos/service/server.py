"""The gRPC server of every service: with health, reflection, limits and keepalive."""

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos.errors import ConfigurationRefused, Context, Overloaded, abort
from protos.limits import MAX_CONCURRENT_RPCS
from protos.service.channels import PLAIN, LinkSecurity
from protos.service.grpc_options import (
    MAX_SOCKET_PATH_BYTES,
    SERVER_OPTIONS,
    Continuation,
    Handler,
    unix_address,
)


def _is_listening(path: Path) -> bool:
    """Whether a process accepts connections on a Unix socket; raises `OSError` if it is not a socket."""
    if not path.is_socket():
        raise FileExistsError(errno.EEXIST, "the path is a file")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True


class Server:
    """Serves some servicers, ``grpc.health.v1`` and reflection.

    Health starts as NOT_SERVING, and only :meth:`set_serving` changes it: a running process need not be
    healthy.
    """

    def __init__(
        self,
        service_names: Iterable[str],
        register: Callable[[grpc.aio.Server], None],
        *,
        max_concurrent_rpcs: int = MAX_CONCURRENT_RPCS,
        security: LinkSecurity = PLAIN,
    ) -> None:
        """Prepares the server.

        Args:
            service_names: full names of the services, for health and reflection ("triptych.v1.Inference").
            register: adds the servicers; called once.
            max_concurrent_rpcs: limit of calls at a time.
            security: the protection of connections and calls.
        """
        self._names = tuple(service_names)
        self._security = security
        # Refused calls take no place among those that may run.
        interceptors = (*security.interceptors(), CallLimit(max_concurrent_rpcs))
        self._server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
        self._health = health.aio.HealthServicer()
        register(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        self.port = 0
        """The bound port; set by :meth:`start`."""

    async def start(self, host: str, port: int, path: Path | None = None) -> int:
        """Binds ``host:port`` (0: any free port) and the Unix socket at `path`, starts, and returns the port.

        An empty host binds no port, and returns 0.

        Raises:
            ConfigurationRefused: an address cannot be bound, or there is none.
        """
        await self.set_serving(False)
        if path is not None:
            self._bind_socket(path)
        elif not host:
            raise ConfigurationRefused("an empty --host needs a --socket to listen on; set one of them")
        if host:
            self.port = self._bind_port(host, port)
        await self._server.start()
        return self.port

    def _bind_port(self, host: str, port: int) -> int:
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            # Try a plain socket first: gRPC prints an internal trace when it cannot bind.
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            socket.create_server((host, port), family=family).close()
            bound = self._security.add_port(self._server, address)
        except (OSError, RuntimeError) as error:
            raise ConfigurationRefused(
                f"cannot listen on {address}: {error}; choose another host or port"
            ) from error
        self._security.warn_if_open(host)
        return bound

    def _bind_socket(self, path: Path) -> None:
        path = path.absolute()
        try:
            if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
                raise OSError(f"its path has more than {MAX_SOCKET_PATH_BYTES} bytes")
            if path.exists() and _is_listening(path):
                raise OSError("another process listens on it")
            # Try a plain socket first, as for a port.
            path.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as probe:
                probe.bind(str(path))
            self._server.add_insecure_port(unix_address(path))
            # Whoever can write to the file can call; the umask decides about the group.
            path.chmod(path.stat().st_mode & ~0o007)
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ConfigurationRefused(
                f"cannot listen on the Unix socket {path}: {reason}; choose another path"
            ) from error

    async def set_serving(self, serving: bool, *names: str) -> None:
        """Reports SERVING or NOT_SERVING for the named services, or for all and the whole server."""
        states = health_pb2.HealthCheckResponse
        for name in names or ("", *self._names):
            await self._health.set(name, states.SERVING if serving else states.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Reports NOT_SERVING, refuses new calls and waits up to ``grace_s`` seconds for running calls."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def check_addresses(host: str, port: int, path: Path | None, security: LinkSecurity) -> None:
    """Binds a server's addresses for a moment; refuses an unusable address."""

    async def bind() -> None:
        server = Server((), lambda _: None, security=security)
        await server.start(host, port, path)
        await server.stop(0)

    asyncio.run(bind())
    if path is not None:
        path.unlink(missing_ok=True)


# Short, and needed to tell a busy server from a dead one.
_EXEMPT: Final = "/grpc.health.v1.Health/Check"

_RETRY_AFTER_MS: Final = 1000


class CallLimit(grpc.aio.ServerInterceptor):
    """Refuses calls above a number, with a typed error and the setting's name.

    The server's own ``maximum_concurrent_rpcs`` would refuse them without a reason.
    """

    def __init__(self, max_calls: int) -> None:
        self._max_calls = max_calls
        self._running = 0

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
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
