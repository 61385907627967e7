"""Certificates for tests: a CA, what it signs, and the files of services."""

import datetime as dt
import functools
from pathlib import Path

from cryptography.x509.oid import ExtendedKeyUsageOID

from deploy.secure_files import Issued, issue
from protos.service.tls import CertificatePaths

BOTH = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
HOSTS = ("localhost", "127.0.0.1")
TOKEN = "the-token-of-the-tests"  # noqa: S105 - protects nothing
OTHER_TOKEN = "another-token-of-the-tests"  # noqa: S105 - protects nothing


@functools.cache
def ca(name: str = "ours") -> Issued:
    """Returns a CA; each name has one."""
    return issue(f"CA {name}")


def service_files(
    folder: Path,
    *,
    signed_by: str = "ours",
    trusts: str = "ours",
    days: float = 1,
    hosts: tuple[str, ...] = HOSTS,
) -> CertificatePaths:
    """Writes a new certificate, its key and the CA to trust, each file at once.

    Args:
        folder: for the files; replaces those that it has.
        signed_by: the CA of the certificate.
        trusts: the CA of peers.
        days: how long the certificate lasts; negative for one that has expired.
        hosts: names that the certificate is for.
    """
    folder.mkdir(exist_ok=True)
    lasts = dt.timedelta(days=days) if days > 0 else dt.timedelta(minutes=-1)
    issued = issue("service", hosts, BOTH, ca(signed_by), lasts=lasts)
    paths = CertificatePaths(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    content = (ca(trusts).pem, issued.pem, issued.key_pem)
    for path, data in zip((paths.ca, paths.cert, paths.key), content, strict=True):
        assert path is not None
        new = path.with_suffix(".new")
        new.write_bytes(data)
        new.replace(path)
    return paths
