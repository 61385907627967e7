"""The certificate files of a service, checked, and read again when they change."""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from protos.errors import ConfigurationRefused
from protos.security.watched_files import WatchedFiles, read_bytes


@dataclass(frozen=True)
class CertificatePaths:
    """Where the PEM files are."""

    ca: Path
    """The certificates that sign those of peers."""
    cert: Path | None = None
    """The service's own certificate, followed by intermediate certificates; `None` for a client without a
    certificate."""
    key: Path | None = None
    """The key of `cert`."""


@dataclass(frozen=True)
class Pems:
    """The content of the files."""

    ca: bytes
    cert: bytes | None
    key: bytes | None


class Certificates:
    """The certificates of a service, as gRPC takes them."""

    def __init__(self, paths: CertificatePaths) -> None:
        """Reads the files.

        Raises:
            ConfigurationRefused: a file is missing or bad, or the key is not the certificate's.
        """
        files = tuple(path for path in (paths.ca, paths.cert, paths.key) if path is not None)
        self._files = WatchedFiles(files, lambda: _read(paths))

    def version(self) -> int:
        """Looks at the files; returns a number that grows with every change."""
        self._files.get()
        return self._files.version

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns the credentials of a new channel."""
        pems = self._files.get()
        return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)

    def server_credentials(self, *, require_client_cert: bool) -> grpc.ServerCredentials:
        """Returns the credentials of a server's port. Each new connection uses the current files."""
        seen = self._files.version

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal seen
            if self.version() == seen:
                return None
            seen = self._files.version
            return self._server_configuration()

        return grpc.dynamic_ssl_server_credentials(
            self._server_configuration(),
            changed,  # type: ignore[arg-type] # `None` for no change is documented
            require_client_authentication=require_client_cert,
        )

    def _server_configuration(self) -> grpc.ServerCertificateConfiguration:
        pems = self._files.get()
        assert pems.key is not None
        assert pems.cert is not None
        return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca)


def _read(paths: CertificatePaths) -> Pems:
    ca = read_bytes(paths.ca, "--grpc-tls-ca")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Comments between certificates may have other letters.
        context.load_verify_locations(cadata=ca.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigurationRefused(f"--grpc-tls-ca: {paths.ca} has no PEM certificates") from error
    if paths.cert is None or paths.key is None:
        return Pems(ca, None, None)
    cert = read_bytes(paths.cert, "--grpc-tls-cert")
    key = read_bytes(paths.key, "--grpc-tls-key")
    try:
        # An encrypted key would ask for its password on the terminal.
        context.load_cert_chain(paths.cert, paths.key, password=lambda: "")
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise ConfigurationRefused(
            f"--grpc-tls-cert and --grpc-tls-key: {paths.cert} and {paths.key} are not a PEM certificate and its"
            " unencrypted key"
        ) from error
    return Pems(ca, cert, key)
