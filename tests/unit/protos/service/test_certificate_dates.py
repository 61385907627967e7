"""Certificates near and after their end: refused, logged and counted, also when files are replaced."""

import datetime as dt
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from deploy.secure_files import issue
from gateway.http.listeners import ServerTls
from gateway.settings import Settings as GatewaySettings
from protos.errors import ConfigurationRefused
from protos.service.tls import CertificatePaths, Certificates, Expiries
from tests.support.security.certificates import ca, service_files


def https(paths: CertificatePaths) -> Expiries:
    settings = GatewaySettings(
        ssl_certfile=paths.cert, ssl_keyfile=paths.key, ssl_ca_certs=paths.ca, ssl_cert_reqs=2
    )
    found = ServerTls.from_settings(settings)
    assert found is not None
    return found.expiries


def links(paths: CertificatePaths) -> Expiries:
    return Certificates(paths).expiries


ENDS = pytest.mark.parametrize(
    ("read", "own", "cas"),
    [(https, "--ssl-certfile", "--ssl-ca-certs"), (links, "--grpc-tls-cert", "--grpc-tls-ca")],
    ids=["https", "links"],
)
Read = Callable[[CertificatePaths], Expiries]


def ended(name: str) -> bytes:
    return issue(name, lasts=dt.timedelta(minutes=-1)).pem


@ENDS
def test_a_service_does_not_start_with_a_certificate_that_has_ended(
    tmp_path: Path, read: Read, own: str, cas: str
) -> None:
    """The line names setting, file and date. A CA on its way out may stay beside its successor."""
    paths = service_files(tmp_path, days=-1)
    day = dt.datetime.now(dt.UTC) - dt.timedelta(minutes=2)
    with pytest.raises(
        ConfigurationRefused, match=f"{own}: the certificate in {paths.cert} ended on {day:%Y-%m}"
    ):
        read(paths)
    service_files(tmp_path)
    paths.ca.write_bytes(ended("old"))
    with pytest.raises(ConfigurationRefused, match=f"{cas}: the certificate in {paths.ca} ended on"):
        read(paths)
    paths.ca.write_bytes(ended("old") + ca().pem)
    assert read(paths).days_left().keys() == {own, cas}


@ENDS
@pytest.mark.parametrize(("days", "text"), [(29.5, "ends in 29 days"), (1.5, "ends in 1 day"), (31, "")])
def test_from_thirty_days_on_each_day_has_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Read, own: str, cas: str, days: float, text: str
) -> None:
    """Also for a service that runs on without a change of its files."""
    paths = service_files(tmp_path, days=days)
    expected = [f"{own}: the certificate in {paths.cert} {text}"] if text else []
    with capture_logs() as logs:
        expiries = read(paths)
        expiries.remind()
    assert [line["reason"] for line in logs if line["event"] == "certificate_ends"] == expected
    assert expiries.days_left()[own] == pytest.approx(days, abs=0.01)
    now_s = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: now_s + 86_401)
    with capture_logs() as logs:
        expiries.remind()
        expiries.remind()
    assert [line["reason"] for line in logs] == expected


def test_a_renewed_certificate_counts_and_an_old_one_is_not_taken(tmp_path: Path) -> None:
    certificates = Certificates(service_files(tmp_path, days=90))
    with capture_logs() as logs:
        service_files(tmp_path, days=-1)
        certificates.version()
    assert [line["event"] for line in logs] == ["files_not_reloaded"]
    assert "ended on" in logs[0]["reason"]
    assert certificates.expiries.days_left()["--grpc-tls-cert"] == pytest.approx(90, abs=0.01)
    with capture_logs() as logs:
        service_files(tmp_path, days=20)
        certificates.version()
    assert [line["event"] for line in logs] == ["certificate_ends", "files_reloaded"]
    assert certificates.expiries.days_left()["--grpc-tls-cert"] == pytest.approx(20, abs=0.01)


def test_a_client_without_a_certificate_counts_its_ca(tmp_path: Path) -> None:
    paths = CertificatePaths(service_files(tmp_path).ca)
    assert Certificates(paths).expiries.days_left()["--grpc-tls-ca"] == pytest.approx(397, abs=0.1)
