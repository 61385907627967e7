"""Makes the files of a secure deployment: certificates, a service token and an API key.

The key of the CA is never written: it signs two certificates and is forgotten. New files therefore have a new
CA.
"""

import datetime as dt
import hashlib
import ipaddress
import json
import os
import secrets
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from protos.errors import ConfigurationRefused
from protos.service.private_files import check, make_folder

SERVICE_NAME: Final = "triptych.internal"
"""The name in the certificate of all services: ``--grpc-tls-name``."""

_VALID: Final = dt.timedelta(days=397)
_RENEW_BEFORE: Final = dt.timedelta(days=30)
# Clocks differ between machines.
_EARLIER: Final = dt.timedelta(minutes=10)


@dataclass(frozen=True)
class SecureFiles:
    """The files of a folder."""

    folder: Path
    ca: Path
    """The CA's certificate, for all clients. It is no secret."""
    service_cert: Path
    """The certificate of the services."""
    service_key: Path
    http_cert: Path
    """The certificate of the HTTP API."""
    http_key: Path
    service_token: Path
    """The token that the services share."""
    api_key: Path
    """A key of the HTTP API, for clients."""
    api_keys: Path
    """The gateway's file of keys, ``--api-key-file``, with a hash of the key."""

    @classmethod
    def in_folder(cls, folder: Path) -> "SecureFiles":
        """Returns the files of a folder, made or not."""
        names = ("ca.pem", "service.pem", "service-key.pem", "http.pem", "http-key.pem")
        return cls(folder, *(folder / name for name in (*names, "service-token", "api-key", "api-keys.json")))


def make(folder: Path, hosts: Iterable[str] = (), *, only_token: bool = False) -> SecureFiles:
    """Makes the files that a folder lacks, or the service token alone; certificates 30 days early.

    `hosts` are names and addresses of the HTTP API in addition to those of the loopback.

    Raises:
        ConfigurationRefused: a host has letters that certificates do not allow, or others may have changed
            the folder or one of its files.
    """
    files = SecureFiles.in_folder(folder)
    make_folder(folder, "the folder of secrets", "choose another")
    check_files(files)
    if not files.service_token.exists():
        _write(files.service_token, f"{secrets.token_urlsafe(32)}\n".encode())
    if only_token:
        return files
    if not files.api_keys.exists():
        key = secrets.token_urlsafe(32)
        entry = {"name": "default", "sha256": hashlib.sha256(key.encode()).hexdigest()}
        _write(files.api_key, f"{key}\n".encode())
        _write(files.api_keys, f"{json.dumps({'keys': [entry]}, indent=2)}\n".encode())
    # A renewed certificate keeps the names that an earlier call gave it.
    names = list(dict.fromkeys([*hosts, "localhost", "127.0.0.1", "::1", *_names_of(files.http_cert)]))
    if not _are_valid(files, names):
        _make_certificates(files, names)
    return files


def check_files(files: SecureFiles) -> None:
    """Refuses a folder or files that others may have changed."""
    check(files.folder, "the folder of secrets", "choose another")
    for path in filter(Path.exists, vars(files).values()):
        check(path, "the secret", "remove it, and a new one is made")


def _make_certificates(files: SecureFiles, names: Sequence[str]) -> None:
    ca = issue(f"Triptych CA {secrets.token_hex(4)}")
    both = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
    service = issue(SERVICE_NAME, (SERVICE_NAME, "localhost", "127.0.0.1", "::1"), both, ca)
    http = issue("Triptych HTTP API", names, both[:1], ca)
    _write(files.service_key, service.key_pem)
    _write(files.http_key, http.key_pem)
    _write(files.service_cert, service.pem)
    _write(files.http_cert, http.pem)
    _write(files.ca, ca.pem)


@dataclass(frozen=True)
class Issued:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        """The certificate's file."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        """The key's file, unencrypted."""
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


def issue(
    subject: str,
    names: Sequence[str] = (),
    usages: Sequence[x509.ObjectIdentifier] = (),
    issuer: Issued | None = None,
    *,
    lasts: dt.timedelta = _VALID,
) -> Issued:
    """Returns a new certificate for host names and addresses; a CA's if it has no issuer."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    signer, issuer_name = (key, name) if issuer is None else (issuer.key, issuer.certificate.subject)
    now = dt.datetime.now(dt.UTC)
    is_ca = issuer is None
    usage = {
        "digital_signature": not is_ca, "key_cert_sign": is_ca, "crl_sign": is_ca, "content_commitment": False,
        "key_encipherment": False, "data_encipherment": False, "key_agreement": False,
        "encipher_only": False, "decipher_only": False,
    }  # fmt: skip
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer_name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + lasts)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    if names:
        general = [_general_name(text) for text in names]
        builder = builder.add_extension(x509.SubjectAlternativeName(general), critical=False)
    if usages:
        builder = builder.add_extension(x509.ExtendedKeyUsage(list(usages)), critical=False)
    return Issued(builder.sign(signer, hashes.SHA256()), key)


def _general_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        pass
    try:
        return x509.DNSName(text)
    except ValueError as error:
        raise ConfigurationRefused(
            f"--host: {text!r} is not a host name in ASCII characters;"
            " write its IDNA form, such as xn--mnchen-3ya.example"
        ) from error


def _names_of(certificate: Path) -> list[str]:
    """Returns the names and addresses that a certificate is for; none if it is not there, or damaged."""
    try:
        extensions = x509.load_pem_x509_certificate(certificate.read_bytes()).extensions
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return []
    return [str(name.value) for name in names]


def _are_valid(files: SecureFiles, names: Iterable[str]) -> bool:
    """Whether all certificates are there, belong together, last for a while, and have the names."""
    try:
        ca, *signed = (
            x509.load_pem_x509_certificate(path.read_bytes())
            for path in (files.ca, files.service_cert, files.http_cert)
        )
        for certificate in signed:
            certificate.verify_directly_issued_by(ca)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.service_cert, files.service_key)
        context.load_cert_chain(files.http_cert, files.http_key)
    except (OSError, ValueError, InvalidSignature):
        return False
    soon = dt.datetime.now(dt.UTC) + _RENEW_BEFORE
    has = signed[-1].extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    lasting = all(one.not_valid_after_utc > soon for one in (ca, *signed))
    return lasting and {_general_name(name) for name in names} <= set(has)


def _write(path: Path, content: bytes) -> None:
    """Replaces a file atomically; only its owner can read it."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    new.replace(path)
