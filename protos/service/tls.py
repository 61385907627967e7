"""The certificate files of a service: checked, and read again after changes."""

import asyncio
import datetime as dt
import math
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import grpc

from protos.errors import ConfigurationRefused
from protos.service.logs import get_logger
from protos.service.private_files import read_secret


@dataclass(frozen=True)
class CertificatePaths:
    """Where the PEM files are."""

    ca: Path
    """The certificates of the CA of all peers."""
    cert: Path | None = None
    """The service's own certificate, followed by intermediate certificates; `None` for a client without a
    certificate."""
    key: Path | None = None
    """The key of `cert`."""


_DAY_S = 86_400.0
_REMIND_DAYS = 30
_LOOK_EVERY_S = 600.0


class PemFile(NamedTuple):
    """A file of certificates."""

    flag: str
    """The setting that names it."""
    path: Path
    content: bytes
    is_ca: bool = False
    """Whether it contains CAs, maybe also an old one being replaced: the latest end counts, not the first
    certificate."""


class Expiries:
    """The ends of a service's certificates, by the setting of their file."""

    def __init__(self, look: Callable[[], object]) -> None:
        """Starts empty; `look` reads changed files, and so calls :meth:`note`."""
        self._look = look
        self._ends: dict[str, tuple[Path, float]] = {}
        self._reminded_s = -math.inf

    def note(self, *files: PemFile) -> None:
        """Notes the ends of new certificates; refuses expired certificates."""
        from cryptography import x509  # only services with TLS need it

        ends: dict[str, tuple[Path, float]] = {}
        for flag, path, content, is_ca in files:
            try:
                found = [each.not_valid_after_utc for each in x509.load_pem_x509_certificates(content)]
            except ValueError:  # OpenSSL, which has read the file, is less strict
                continue
            end = max(found) if is_ca else found[0]
            if end <= dt.datetime.now(dt.UTC):
                raise ConfigurationRefused(
                    f"{flag}: the certificate in {path} ended on {end:%Y-%m-%d %H:%M} UTC; replace it"
                )
            ends[flag] = path, end.timestamp()
        if ends != self._ends:
            self._ends, self._reminded_s = ends, -math.inf
        self._log_soon()

    def days_left(self) -> dict[str, float]:
        """Returns the remaining days of each certificate, by setting; negative after its end."""
        self._look()
        return {flag: (end - time.time()) / _DAY_S for flag, (_, end) in self._ends.items()}

    def soon(self) -> list[str]:
        """Describes the certificates with an end within 30 days."""
        lines = []
        for flag, (path, end) in self._ends.items():
            days = math.floor((end - time.time()) / _DAY_S)
            when = "has ended" if days < 0 else f"ends in {days} day{'s'[: days != 1]}"
            if days < _REMIND_DAYS:
                lines.append(f"{flag}: the certificate in {path} {when}")
        return lines

    def remind(self) -> None:
        """Looks at the files, and logs once a day which certificates end soon; call it now and then."""
        self._look()
        self._log_soon()

    def _log_soon(self) -> None:
        if time.monotonic() - self._reminded_s >= _DAY_S:
            self._reminded_s = time.monotonic()
            for reason in self.soon():
                get_logger().warning("certificate_ends", reason=reason)


async def keep_reminding(known: Iterable[Expiries]) -> None:
    """Logs certificates close to their end every day until cancelled, even without connections."""
    while True:
        for each in known:
            each.remind()
        await asyncio.sleep(_LOOK_EVERY_S)


class Certificates:
    """The certificates of a service, as gRPC takes them."""

    def __init__(self, paths: CertificatePaths) -> None:
        """Reads the files; refuses missing, bad and expired files, and a key of another certificate."""
        self.expiries = Expiries(self.version)
        """When they end."""
        files = tuple(path for path in (paths.ca, paths.cert, paths.key) if path is not None)
        self._files = WatchedFiles(files, lambda: _read(paths, self.expiries))

    def version(self) -> int:
        """Looks at the files; returns a number, higher after every change."""
        self._files.get()
        return self._files.version

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns the credentials of a new channel."""
        ca, cert, key = self._files.get()
        return grpc.ssl_channel_credentials(ca, key, cert)

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
        ca, cert, key = self._files.get()
        assert key is not None
        assert cert is not None
        return grpc.ssl_server_certificate_configuration([(key, cert)], ca)


def _read(paths: CertificatePaths, expiries: Expiries) -> tuple[bytes, bytes | None, bytes | None]:
    """Returns the contents of the three files, and notes when they end."""
    ca = read_secret(paths.ca, "--grpc-tls-ca")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Comments between certificates may have other letters.
        context.load_verify_locations(cadata=ca.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigurationRefused(f"--grpc-tls-ca: {paths.ca} has no PEM certificates") from error
    cas = PemFile("--grpc-tls-ca", paths.ca, ca, is_ca=True)
    if paths.cert is None or paths.key is None:
        expiries.note(cas)
        return ca, None, None
    cert = read_secret(paths.cert, "--grpc-tls-cert")
    key = read_secret(paths.key, "--grpc-tls-key")
    try:
        # An encrypted key would ask for its password on the terminal.
        context.load_cert_chain(paths.cert, paths.key, password=lambda: "")
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise ConfigurationRefused(
            f"--grpc-tls-cert and --grpc-tls-key: {paths.cert} and {paths.key} are not a PEM certificate and its"
            " unencrypted key"
        ) from error
    expiries.note(cas, PemFile("--grpc-tls-cert", paths.cert, cert))
    return ca, cert, key


T = TypeVar("T")


class WatchedFiles(Generic[T]):
    """The content of some files, as a value. Any thread may read it."""

    version: int
    """Grows with every change of the content."""

    def __init__(self, paths: tuple[Path, ...], read: Callable[[], T]) -> None:
        """Reads the files with `read`, and again when they change."""
        self.version = 0
        self._paths = paths
        self._read = read
        self._seen = self._state()
        self._value = read()
        self._log = get_logger(files=[str(path) for path in paths])

    def have_changed(self) -> bool:
        """Whether :meth:`get` would read the files."""
        return self._state() != self._seen

    def get(self) -> T:
        """Returns the content. Files that are bad now, such as half of a new pair, do not replace it."""
        state = self._state()
        if state != self._seen:
            self._seen = state
            try:
                self._value = self._read()
            except ConfigurationRefused as error:
                self._log.warning("files_not_reloaded", reason=error.message, using="what they held before")
            else:
                self.version += 1
                self._log.info("files_reloaded")
        return self._value

    def _state(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_state_of, self._paths))


def _state_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
