"""A grpc.aio server as every Triptych service runs it: health, reflection, limits, keepalive, one clear error on a taken port."""

import socket
from collections.abc import Callable, Iterable

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos.errors import ConfigurationRefused
from protos.wire import SERVER_OPTIONS


class Server:
    """Serves some servicers beside ``grpc.health.v1`` and reflection.

    Health starts as NOT_SERVING and is only ever changed by :meth:`set_serving`: "the process runs" is not health.

    Attributes:
        port: the bound port; set by :meth:`start`.
    """

    def __init__(self, service_names: Iterable[str], register: Callable[[grpc.aio.Server], None]) -> None:
        """Prepares the server.

        Args:
            service_names: full names of the services, for health and reflection ("triptych.v1.Inference").
            register: adds the servicers (called once).
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

    async def start(self, host: str, port: int) -> int:
        """Binds and starts; returns the port (useful with ``port`` 0).

        Raises:
            ConfigurationRefused: if the address cannot be bound.
        """
        await self.set_serving(False)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            # gRPC's own failure to bind prints an internal trace before it raises; a plain socket says why.
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
        """Reports SERVING or NOT_SERVING for these services; for all and the server as a whole ("") without names."""
        states = health_pb2.HealthCheckResponse
        for name in names or ("", *self._names):
            await self._health.set(name, states.SERVING if serving else states.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Reports NOT_SERVING for good, refuses new calls and waits up to ``grace_s`` seconds for those under way."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
