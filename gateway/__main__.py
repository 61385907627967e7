"""Starts a gateway: ``triptych gateway`` or ``python -m gateway``."""

import asyncio
import contextlib
import functools
import gc
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final, cast

import uvicorn

from gateway.app import create_app
from gateway.http.listeners import ServerTls, listen, unix_listener
from gateway.http.protocol import BoundedProtocol, PacedStarts
from gateway.scheduler_client.client import InferenceClient
from gateway.scheduler_client.in_flight import StartupQueue
from gateway.settings import Settings
from protos.errors import ConfigurationRefused, TriptychError, Unavailable, print_end
from protos.service import logs
from protos.service.environment import check_for_service
from protos.service.settings import load
from protos.service.tracing import Tracer, open_tracer

# Files that are open beside the clients' connections: modules, logs, the scheduler's channel.
_OTHER_FILES: Final = 256
# How long a gateway that refuses its model takes to answer the requests that wait for one.
_REFUSAL_S: Final = 0.1


class HttpServer(uvicorn.Server):
    """uvicorn's server, with a bounded shutdown: a signal ends it with exit code 0 and without tracebacks."""

    def __init__(self, config: uvicorn.Config, client: InferenceClient, drain_s: float) -> None:
        super().__init__(config)
        self._client = client
        self._drain_s = drain_s
        self._refused = False

    def refuse(self, error: TriptychError) -> None:
        """Prints the error as one line, and ends the process with exit code 2, whatever else holds it up."""
        if self._refused:
            return
        print_end("gateway", error)
        self._refused = self.should_exit = True
        self._client.fail_all(error)
        end = threading.Timer(_REFUSAL_S, os._exit, (2,))
        end.daemon = True
        end.start()

    def serve_until_signal(self, sockets: list[socket.socket]) -> int:
        """Serves; returns the exit code."""
        # Modules stay. Looking at them in each collection holds up all streams for longer than a large body.
        gc.freeze()
        # Threads that read large bodies yield to the event loop five times sooner than by default.
        sys.setswitchinterval(0.001)
        self.run(sockets)
        return 2 if self._refused else 0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles SIGINT and SIGTERM. Unlike uvicorn's own, does not raise the signals again at the end."""
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - as signal handlers
        """Drains on the first signal; ends running requests on a later SIGINT."""
        # `timeout` and process managers send SIGTERM twice; only a person in a hurry presses Ctrl-C again.
        if self.should_exit and sig == signal.SIGINT:
            self._end_requests()
        self.should_exit = True

    def _end_requests(self) -> None:
        self._client.fail_all(Unavailable("the gateway is shutting down; send the request again"))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops listening and waits for running requests, up to the drain's end."""
        logs.get_logger().info("draining", pending=self._client.num_pending, timeout_s=self._drain_s)
        timer = asyncio.get_running_loop().call_later(self._drain_s, self._end_requests)
        await super().shutdown(sockets)
        timer.cancel()


def http_config(settings: Settings, app: Any, tls: ServerTls | None) -> uvicorn.Config:
    """Returns uvicorn's configuration for ``app``; without ``tls`` it speaks plain HTTP."""
    protocol = functools.partial(
        BoundedProtocol,
        read_timeout_s=settings.read_timeout_s,
        write_timeout_s=settings.write_timeout_s,
        unread=app.state.context.unread,
        starts=PacedStarts(),
    )
    return uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", protocol),
        loop="uvloop",
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        ssl_context_factory=None if tls is None else lambda *_: tls.context,
        # uvicorn refuses the connection that reaches its limit.
        limit_concurrency=settings.max_connections + 1,
        timeout_keep_alive=settings.keep_alive_s,
        # The end of the drain ends requests before this limit, which catches what hangs even then.
        timeout_graceful_shutdown=int(settings.drain_s) + 5,
    )


def allow_files(count: int) -> None:
    """Raises the process' limit of open files to ``count`` if the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def build(settings: Settings, tracer: Tracer | None) -> HttpServer:
    """Builds the gateway's server, which listens nowhere yet."""
    security, tls = settings.link_security(), ServerTls.from_settings(settings)
    client = InferenceClient(
        settings.scheduler_address,
        resume_timeout_s=settings.resume_timeout_s,
        call_timeout_s=settings.call_timeout_s,
        startup_queue=StartupQueue(settings.max_parked_requests, settings.park_timeout_s),
        security=security,
    )

    def refuse(error: TriptychError) -> None:
        server.refuse(error)

    app = create_app(settings, client, tracer=tracer, on_unusable=refuse)
    certificates = app.state.context.metrics.certificates
    certificates.expiries += [*security.expiries, *([] if tls is None else [tls.expiries])]
    server = HttpServer(http_config(settings, app, tls), client, settings.drain_s)
    return server


def check(settings: Settings) -> None:
    """Makes the checks of a start without serving."""
    tracer = open_tracer(settings.otlp_traces_endpoint, "gateway")
    build(settings, tracer)
    with listening(settings) as listeners:
        for each in listeners:
            each.close()
    if tracer is not None:
        tracer.close()


def serve(settings: Settings) -> int:
    """Runs the gateway until a signal or an unusable model ends it; returns the exit code."""
    tracer = open_tracer(settings.otlp_traces_endpoint, "gateway")
    try:
        server = build(settings, tracer)
        with listening(settings) as listeners:
            code = _run(settings, server, listeners)
    finally:
        if tracer is not None:
            tracer.close()
    logs.get_logger().info("stopped")
    return code


@contextlib.contextmanager
def listening(settings: Settings) -> Iterator[list[socket.socket]]:
    """Yields the socket of the API, and that of ``--metrics-port`` if it is set."""
    with contextlib.ExitStack() as stack:
        if settings.uds is None:
            listeners = [listen(settings.host, settings.port, reuse_port=settings.reuse_port)]
        else:
            listeners = [stack.enter_context(unix_listener(settings.uds))]
        if settings.metrics_port is not None:
            listeners.append(listen(settings.host, settings.metrics_port))
        yield listeners


def _run(settings: Settings, server: HttpServer, listeners: list[socket.socket]) -> int:
    ports = [None if each.family is socket.AF_UNIX else each.getsockname()[1] for each in listeners]
    allow_files(settings.max_connections + _OTHER_FILES)
    logs.get_logger().info(
        "listening",
        host=settings.host,
        port=ports[0],
        uds=settings.uds and str(settings.uds),
        metrics_port=ports[1] if len(ports) > 1 else None,
        tls=settings.ssl_certfile is not None,
        scheduler=settings.scheduler_address,
    )
    return server.serve_until_signal(listeners)


def main(argv: list[str] | None = None) -> int:
    """Runs ``triptych gateway``; returns the exit code: 2 for invalid settings."""
    try:
        settings = load(Settings, argv)
        logs.configure("gateway", level=settings.log_level, log_format=settings.log_format)
        check_for_service(os.environ)
        return serve(settings)
    except ConfigurationRefused as error:
        print_end("gateway", error)
        return 2


if __name__ == "__main__":
    sys.exit(main())
