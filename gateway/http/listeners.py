"""The sockets of the HTTP ports, and their TLS from files that may change while the gateway runs."""

import contextlib
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NoReturn, Self

from gateway.settings import SecuritySettings
from protos.errors import ConfigurationRefused
from protos.service.private_files import read_secret
from protos.service.tls import Expiries, PemFile, WatchedFiles

_BACKLOG: Final = 2048
# Bytes of a connection that the system buffers, and so the most that one read takes. Without a limit, uvloop
# takes 256 KB from each of thousands of connections at once.
_RECEIVE_BUFFER: Final = 64 * 1024
_ADVICE: Final = "check that they are PEM files, belong together and may be read"


def listen(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """Returns a listening socket; with ``reuse_port``, others may listen on the same port."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG, reuse_port=reuse_port)
    except OSError as error:
        raise ConfigurationRefused(
            f"cannot listen on {host}:{port}: {_socket_reason(error)}; choose another --host or --port"
        ) from error
    # Connections inherit it.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
    return listener


def _socket_reason(error: OSError) -> str:
    # For error numbers, asyncio and socket append the address to the text. Errors of name resolution have
    # their own numbers.
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror or error)


@contextlib.contextmanager
def unix_listener(path: Path) -> Iterator[socket.socket]:
    """Yields a listening socket at ``path``; removes the file at the end.

    The file of a dead process is replaced.
    """
    if _answers(path):
        raise ConfigurationRefused(f"--uds {path}: another process listens there; choose another path")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with listener:
        try:
            if path.is_socket():
                path.unlink()
            listener.bind(str(path))
            listener.listen(_BACKLOG)
        except OSError as error:
            raise ConfigurationRefused(
                f"--uds {path}: {error.strerror or error}; choose another path"
            ) from error
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


class ServerTls:
    """The server's side of TLS. New connections use the files as they are."""

    def __init__(self, settings: SecuritySettings, certfile: Path) -> None:
        """Reads the files.

        Raises:
            ConfigurationRefused: if a file cannot be read or has expired, or two do not belong together.
        """
        self._settings = settings
        self._certfile = certfile
        self.expiries = Expiries(lambda: self._latest.get())  # noqa: PLW0108 - it has yet to be made
        """When the certificates end."""
        paths = (certfile, settings.ssl_keyfile, settings.ssl_ca_certs)
        watched = tuple(path for path in paths if path is not None) if settings.enable_ssl_refresh else ()
        self._latest = WatchedFiles(watched, self._read)
        self.context = self._read()
        """Give it to the server. It hands each connection over to a context made from the latest files."""
        self.context.sni_callback = self._choose

    @classmethod
    def from_settings(cls, settings: SecuritySettings) -> Self | None:
        """Returns the TLS of a gateway; ``None`` if it speaks plain HTTP."""
        return None if settings.ssl_certfile is None else cls(settings, settings.ssl_certfile)

    def _choose(self, connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        # OpenSSL calls this for every handshake. A context that was changed in place would keep the old CAs.
        connection.context = self._latest.get()

    def _read(self) -> ssl.SSLContext:
        settings = self._settings
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.VerifyMode(settings.ssl_cert_reqs)
        if settings.ssl_cert_reqs:
            # A resumed session would not show its certificate to the current CAs.
            context.options |= ssl.OP_NO_TICKET
            context.num_tickets = 0
        keyfile = settings.ssl_keyfile or self._certfile
        try:
            context.load_cert_chain(self._certfile, keyfile, _refuse_passphrase)
        except OSError as error:
            raise ConfigurationRefused(
                f"cannot use the certificate {self._certfile} with the key {keyfile}: {_reason(error)};"
                f" {_ADVICE}"
            ) from None
        if settings.ssl_ca_certs is not None:
            try:
                context.load_verify_locations(settings.ssl_ca_certs)
            except OSError as error:
                raise ConfigurationRefused(
                    f"cannot use --ssl-ca-certs {settings.ssl_ca_certs}: {_reason(error)}; name a PEM file with"
                    " certificates"
                ) from None
        if settings.ssl_ciphers is not None:
            try:
                context.set_ciphers(settings.ssl_ciphers)
            except ssl.SSLError:
                raise ConfigurationRefused(
                    f"--ssl-ciphers {settings.ssl_ciphers} names no cipher that OpenSSL has; see `openssl ciphers`"
                ) from None
        # Checked after the load: whoever could change a file by then still can.
        if settings.ssl_keyfile is not None:
            read_secret(settings.ssl_keyfile, "--ssl-keyfile", most_bytes=0)
        files = (("--ssl-certfile", self._certfile, False), ("--ssl-ca-certs", settings.ssl_ca_certs, True))
        self.expiries.note(
            *(PemFile(flag, path, read_secret(path, flag), is_ca) for flag, path, is_ca in files if path)
        )
        return context


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no PEM").lower().replace("_", " ")
    return str(error.strerror)


def _refuse_passphrase() -> NoReturn:
    raise ConfigurationRefused(
        "the key of --ssl-keyfile has a passphrase, which a service cannot type; remove it"
    )
