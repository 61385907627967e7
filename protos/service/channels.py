"""Channels to other services and ports for them, protected by TLS and the service token."""

import asyncio
import ipaddress
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.service.grpc_options import CHANNEL_OPTIONS, is_unix, open_channel
from protos.service.logs import get_logger
from protos.service.tls import Certificates, Expiries
from protos.service.tokens import METADATA_KEY, ServiceTokens, TokenCheck

# Calls on a channel with old certificates may run as long as they like.
_LONG_S: Final = 1e9


class SecuredChannel(grpc.aio.Channel):
    """Passes calls on to a plain channel of gRPC, and replaces it after changes of the certificates.

    Running calls stay on their channel.
    """

    def __init__(
        self,
        connect: Callable[[], grpc.aio.Channel],
        version: Callable[[], int],
        tokens: ServiceTokens | None,
    ) -> None:
        """Opens the first channel; `version` returns another number after a change of the certificates."""
        self._connect = connect
        self._version = version
        self._tokens = tokens
        self._seen = version()
        self._channel = connect()
        self._retired: set[asyncio.Task[None]] = set()
        self._calls: weakref.WeakSet[Any] = weakref.WeakSet()

    def _current(self) -> grpc.aio.Channel:
        version = self._version()
        if version != self._seen:
            self._seen = version
            self._retire(self._channel)
            self._channel = self._connect()
        return self._channel

    def _retire(self, old: grpc.aio.Channel) -> None:
        task = asyncio.get_running_loop().create_task(old.close(_LONG_S))
        self._retired.add(task)
        task.add_done_callback(self._retired.discard)

    def _method(self, kind: str, args: Sequence[Any], options: dict[str, Any]) -> Callable[..., Any]:
        """Returns a method of a service, called on whichever channel is current."""
        used: grpc.aio.Channel | None = None
        method: Callable[..., Any]

        def call(*call_args: Any, metadata: Any = None, **call_options: Any) -> Any:
            nonlocal used, method
            channel = self._current()
            if channel is not used:
                used, method = channel, getattr(channel, kind)(*args, **options)
            if self._tokens is not None:
                metadata = (*(metadata or ()), (METADATA_KEY, self._tokens.authorization))
            running = method(*call_args, metadata=metadata, **call_options)
            self._calls.add(running)
            return running

        return call

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Closes all channels, after ``grace`` seconds at most, and cancels running calls."""
        await self._channel.close(grace)
        for call in list(self._calls):
            call.cancel()
        await asyncio.gather(*self._retired)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Returns the state of the channel for new calls."""
        return self._current().get_state(try_to_connect=try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Waits for another state of the channel for new calls."""
        await self._current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Waits until the channel for new calls is connected."""
        await self._current().channel_ready()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """Returns a method from a message to a message."""
        return self._method("unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """Returns a method from a message to several messages."""
        return self._method("unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """Returns a method from several messages to a message."""
        return self._method("stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """Returns a method from several messages to several messages."""
        return self._method("stream_stream", args, kwargs)


@dataclass(frozen=True)
class LinkSecurity:
    """The protection of a service's gRPC connections; none without arguments.

    Unix sockets work without TLS, protected by file permissions. Calls through them also carry the token.
    """

    certificates: Certificates | None = None
    """For TLS; `None` for plain connections."""
    tokens: ServiceTokens | None = None
    """Sent by calls, and required by a server; `None` for no check."""
    require_client_cert: bool = False
    """Whether a server refuses clients without a certificate signed by the CA."""
    peer_name: str | None = None
    """Expected name in the servers' certificates; `None` for the called host."""

    @property
    def expiries(self) -> list[Expiries]:
        """When the certificates end, if there are any."""
        return [] if self.certificates is None else [self.certificates.expiries]

    def open_channel(self, address: str) -> grpc.aio.Channel:
        """Opens a channel to another service, at ``host:port`` or ``unix:path``."""
        certificates = None if is_unix(address) else self.certificates
        if certificates is None:
            if self.tokens is None:
                return open_channel(address)
            return SecuredChannel(lambda: open_channel(address), lambda: 0, self.tokens)
        return SecuredChannel(
            lambda: grpc.aio.secure_channel(
                address, certificates.channel_credentials(), options=self._options()
            ),
            certificates.version,
            self.tokens,
        )

    def open_blocking_channel(self, address: str) -> grpc.Channel:
        """Opens a channel without an event loop and without the token: for health checks."""
        if self.certificates is None or is_unix(address):
            return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        return grpc.secure_channel(address, self.certificates.channel_credentials(), options=self._options())

    def _options(self) -> tuple[tuple[str, object], ...]:
        if self.peer_name is None:
            return CHANNEL_OPTIONS
        return (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", self.peer_name))

    def interceptors(self) -> tuple[grpc.aio.ServerInterceptor, ...]:
        """Returns the interceptors of a server."""
        return () if self.tokens is None else (TokenCheck(self.tokens),)

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Makes a server listen on ``host:port``; returns the port."""
        if self.certificates is None:
            return server.add_insecure_port(address)
        credentials = self.certificates.server_credentials(require_client_cert=self.require_client_cert)
        return server.add_secure_port(address, credentials)

    def warn_if_open(self, host: str) -> None:
        """Logs a warning if other machines can call a server without proof, or read its traffic."""
        if _is_loopback(host):
            return
        lacking = []
        if self.tokens is None and not self.require_client_cert:
            lacking.append("every client that reaches the port may use it: set --service-token-file")
        if self.certificates is None:
            lacking.append(
                "the network can read what passes: set --grpc-tls-cert, --grpc-tls-key, --grpc-tls-ca"
            )
        if lacking:
            get_logger().warning("port_unprotected", host=host, reason="; ".join(lacking))


PLAIN = LinkSecurity()
"""No protection: as without settings."""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# Certificates that are replaced meanwhile are used this soon.
_LOOK_EVERY_S: Final = 1.0
_PROBE_TIMEOUT_S: Final = 5.0

# Parts of gRPC's texts for connections that were made, and refused by one of the two ends.
_REFUSALS: Final = {
    "wrong_version_number": "the peer does not use TLS: does it have --grpc-tls-cert?",
    "verif": "the peer's certificate is not accepted: is it expired, from the CA in --grpc-tls-ca, and for"
    " this host or --grpc-tls-name?",
    "handshake failed": "no TLS connection: do both ends have current TLS libraries?",
    "secure read failed": "the peer ends the TLS connection: does it want a client certificate, from its CA and"
    " not expired (--grpc-tls-cert, --grpc-tls-key)?",
    "socket closed": "the peer ends the connection: does it use TLS (--grpc-tls-ca)?",
}


async def wait_until_ready(channel: grpc.aio.Channel, address: str) -> None:
    """Waits until a channel is connected; logs each refusal by either end once.

    A peer before its start is no refusal.
    """
    log, logged, watch = get_logger(address=address), set(), None
    try:
        while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                reason = await _refusal(channel)
                if reason and reason not in logged:
                    logged.add(reason)
                    log.warning("not_connected", reason=reason, retry="until it succeeds")
            if watch is None or watch.done():
                watch = asyncio.ensure_future(channel.wait_for_state_change(state))
            done, _ = await asyncio.wait({watch}, timeout=_LOOK_EVERY_S)
            for ended in done:
                ended.exception()  # of a channel that was closed meanwhile; the next look tells
    finally:
        if watch is not None:
            watch.cancel()


async def _refusal(channel: grpc.aio.Channel) -> str:
    """Returns why a connection was refused; empty if it was not."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=_PROBE_TIMEOUT_S)  # type: ignore[attr-defined]
    except grpc.aio.AioRpcError as error:
        text = (error.details() or "").lower()
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return next((advice for part, advice in _REFUSALS.items() if part in text), "")
    return ""
