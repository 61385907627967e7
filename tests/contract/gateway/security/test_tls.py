"""TLS of the HTTP port: served, renewed without a restart, and with client certificates."""

import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from deploy.secure_files import issue
from gateway.http.listeners import ServerTls
from gateway.settings import Settings
from protos.errors import ConfigurationRefused
from protos.service.tls import CertificatePaths
from tests.support.gateway.fake_scheduler import FakeScheduler
from tests.support.gateway.fake_scheduler import serving as serving_fake
from tests.support.gateway.serving import Gateway, running_gateway, smollm2_folder
from tests.support.security.certificates import BOTH, ca, service_files

pytestmark = pytest.mark.contract


def flags_of(paths: CertificatePaths, **changes: Any) -> dict[str, Any]:
    return {"ssl_certfile": paths.cert, "ssl_keyfile": paths.key, **changes}


@contextlib.asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[Gateway]:
    async with running_gateway(9, wait=False, **settings) as gateway:
        yield gateway


async def version_of(gateway: Gateway, *, trusts: str = "ours", shows: CertificatePaths | None = None) -> int:
    """Asks for /version over a new connection; returns the status."""
    context = ssl.create_default_context(cadata=ca(trusts).pem.decode())
    if shows is not None:
        assert shows.cert is not None
        context.load_cert_chain(shows.cert, shows.key)
    async with httpx.AsyncClient(verify=context, timeout=5) as http:
        return (await http.get(f"https://127.0.0.1:{gateway.port}/version")).status_code


async def test_health_and_metrics_tell_the_days_that_certificates_have_left(tmp_path: Path) -> None:
    """A monitor needs no connection of its own to look at the certificate."""
    scheduler = FakeScheduler(smollm2_folder(), [504])
    paths = service_files(tmp_path, days=12.5)
    async with (
        serving_fake(scheduler) as server,
        running_gateway(server.port, **flags_of(paths)) as gateway,
        httpx.AsyncClient(
            base_url=f"https://127.0.0.1:{gateway.port}",
            verify=ssl.create_default_context(cadata=ca("ours").pem.decode()),
        ) as http,
    ):
        health = await http.get("/health")
        assert health.status_code == 200
        assert health.json() == {"certificate_days_left": {"--ssl-certfile": 12.5}}
        sample = 'triptych:gateway_certificate_days_left{setting="--ssl-certfile"} 12.4'
        assert sample in (await http.get("/metrics")).text
        assert paths.cert is not None
        # OpenSSL takes this form of a certificate, in which no end is found.
        unusual = paths.cert.read_bytes().replace(b" CERTIFICATE-", b" TRUSTED CERTIFICATE-")
        paths.cert.write_bytes(unusual)
        assert await version_of(gateway) == 200
        metrics = await http.get("/metrics")
        assert metrics.status_code == 200
        assert "certificate_days_left{" not in metrics.text


async def test_new_connections_get_a_new_certificate(tmp_path: Path) -> None:
    """The old one is served until both files fit together, and open connections go on."""
    paths = service_files(tmp_path, signed_by="first")
    assert paths.cert is not None
    async with serving(**flags_of(paths)) as gateway:
        assert await version_of(gateway, trusts="first") == 200
        context = ssl.create_default_context(cadata=ca("first").pem.decode())
        async with httpx.AsyncClient(verify=context, timeout=5) as kept:
            url = f"https://127.0.0.1:{gateway.port}/version"
            assert (await kept.get(url)).status_code == 200
            paths.cert.write_bytes(issue("service", ("127.0.0.1",), BOTH, ca("second")).pem)
            assert await version_of(gateway, trusts="first") == 200
            service_files(tmp_path, signed_by="second")
            assert await version_of(gateway, trusts="second") == 200
            with pytest.raises(httpx.ConnectError):
                await version_of(gateway, trusts="first")
            assert (await kept.get(url)).status_code == 200


async def test_clients_must_show_a_certificate_that_a_ca_of_today_signed(tmp_path: Path) -> None:
    """A CA that leaves the file counts no more: a context that is changed in place would keep it."""
    paths = service_files(tmp_path / "server", trusts="clients")
    old = service_files(tmp_path / "old", signed_by="clients")
    new = service_files(tmp_path / "new", signed_by="others")
    async with serving(**flags_of(paths, ssl_ca_certs=paths.ca, ssl_cert_reqs=2)) as gateway:
        assert await version_of(gateway, shows=old) == 200
        for refused in (None, new):
            with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
                await version_of(gateway, shows=refused)
        paths.ca.write_bytes(ca("others").pem)
        assert await version_of(gateway, shows=new) == 200
        with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
            await version_of(gateway, shows=old)


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    """One line says which; nothing asks for a passphrase."""
    ours, other = service_files(tmp_path / "ours"), service_files(tmp_path / "other")
    text, secret = tmp_path / "text.pem", tmp_path / "secret.pem"
    text.write_text("no PEM")
    encrypted = BestAvailableEncryption(b"pass")
    secret.write_bytes(issue("service").key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encrypted))
    for changes, reason in (
        ({"ssl_certfile": tmp_path / "missing"}, "No such file or directory"),
        ({"ssl_keyfile": other.key}, "key values mismatch"),
        ({"ssl_keyfile": text}, "no pem"),
        ({"ssl_keyfile": secret}, "has a passphrase"),
        ({"ssl_ca_certs": text}, "cannot use --ssl-ca-certs"),
        ({"ssl_ciphers": "NONESUCH"}, "names no cipher"),
    ):
        settings = Settings(**flags_of(ours, **changes))
        with pytest.raises(ConfigurationRefused, match=reason) as refused:
            ServerTls.from_settings(settings)
        assert "\n" not in str(refused.value)
    files = flags_of(ours, ssl_ca_certs=ours.ca)
    for name, path in files.items():
        path.chmod(0o622)
        flag = f"--{name.replace('_', '-')}"
        with pytest.raises(ConfigurationRefused, match=f"^{flag}: {path} belongs to .* with mode 0622"):
            ServerTls.from_settings(Settings(**files))
        path.chmod(0o600)
    assert ServerTls.from_settings(Settings(**files)) is not None
    assert ServerTls.from_settings(Settings()) is None
