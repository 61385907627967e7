"""The gRPC server of every service: with health, reflection, limits and keepalive."""

import socket
from collections.abc import Callable, Iterable

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos.errors import ConfigurationRefused
from protos.wire import SERVER_OPTIONS


class Server:
    """Serves some servicers beside ``grpc.health.v1`` and reflection.

    Health starts as NOT_SERVING, and only :meth:`set_serving` changes it: a running process need not be
    healthy.
    """

    def __init__(self, service_names: Iterable[str], register: Callable[[grpc.aio.Server], None]) -> None:
        """Prepares the server.

        Args:
            service_names: full names of the services, for health and reflection ("triptych.v1.Inference").
            register: adds the servicers; called once.
        """
        self._names = tuple(service_names)
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._health = health.aio.HealthServicer()
        register(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        self.port = 0
        """The bound port; set by :meth:`start`."""

    async def start(self, host: str, port: int) -> int:
        """Binds and starts; returns the bound port, which the system chooses for ``port`` 0.

        Raises:
            ConfigurationRefused: the address cannot be bound.
        """
        await self.set_serving(False)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            # Try a plain socket first: gRPC prints an internal trace when it cannot bind.
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            socket.create_server((host, port), family=family).close()
            self.port = self._server.add_insecure_port(address)
        except (OSError, RuntimeError) as error:
            raise ConfigurationRefused(
                f"cannot listen on {address}: {error}; choose another host or port"
            ) from error
        await self._server.start()
        return self.port

    async def set_serving(self, serving: bool, *names: str) -> None:
        """Reports SERVING or NOT_SERVING for the named services, or for all and the whole server."""
        states = health_pb2.HealthCheckResponse
        for name in names or ("", *self._names):
            await self._health.set(name, states.SERVING if serving else states.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Reports NOT_SERVING, refuses new calls and waits up to ``grace_s`` seconds for running ones."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
