"""Protected gRPC servers and channels, by a service's security settings."""

import ipaddress
from dataclasses import dataclass

import grpc.aio

from protos.logs import get_logger
from protos.security.certificates import Certificates
from protos.security.channel import SecuredChannel
from protos.security.token_check import TokenCheck
from protos.security.tokens import ServiceTokens
from protos.wire import CHANNEL_OPTIONS, is_unix, open_channel


@dataclass(frozen=True)
class LinkSecurity:
    """The protection of a service's gRPC connections; none without arguments.

    Unix sockets have no TLS: their files' permissions protect them. Calls through them carry the token, too.
    """

    certificates: Certificates | None = None
    """For TLS; `None` for plain connections."""
    tokens: ServiceTokens | None = None
    """Tokens that calls send and a server requires; `None` for no check."""
    require_client_cert: bool = False
    """Whether a server refuses clients without a certificate signed by the CA."""
    peer_name: str | None = None
    """Expected name in the servers' certificates; `None` for the called host."""

    def open_channel(self, address: str) -> grpc.aio.Channel:
        """Opens a channel to another service.

        Args:
            address: ``host:port`` or ``unix:path``.
        """
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
