"""The files of a secure deployment."""

import datetime as dt
import os
from pathlib import Path

import pytest
from cryptography import x509

from deploy import cli, secure_files
from deploy.launcher.settings import LaunchSettings, secured
from deploy.secure_files import SERVICE_NAME, make
from gateway.auth.key_store import digest_of, read_key_file
from protos.errors import ConfigurationRefused
from protos.service.settings import load
from protos.service.tls import CertificatePaths, Certificates
from protos.service.tokens import ServiceTokens
from tests.support.foreign import Foreign, foreign_folders


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_services_read_the_files_and_others_do_not(tmp_path: Path) -> None:
    """Certificates belong together and have their names; only the owner may read what is secret."""
    files = make(tmp_path / "new", ["api.example"])
    assert {path.stat().st_mode & 0o777 for path in files.folder.iterdir()} == {0o600}
    assert files.folder.stat().st_mode & 0o777 == 0o700
    Certificates(CertificatePaths(files.ca, files.service_cert, files.service_key))
    assert ServiceTokens(file=files.service_token).accepts(
        f"Bearer {files.service_token.read_text().strip()}"
    )
    ca, service, http = (
        x509.load_pem_x509_certificate(path.read_bytes())
        for path in (files.ca, files.service_cert, files.http_cert)
    )
    for signed, name in ((service, SERVICE_NAME), (http, "api.example")):
        signed.verify_directly_issued_by(ca)
        names = signed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert name in names.get_values_for_type(x509.DNSName)
    assert b"PRIVATE" not in files.ca.read_bytes()


def test_the_gateway_knows_the_api_key_by_its_hash(tmp_path: Path) -> None:
    files = make(tmp_path)
    key = files.api_key.read_text().strip()
    assert key not in files.api_keys.read_text()
    (entry,) = read_key_file(files.api_keys)
    assert entry.digest == digest_of(key)


def test_files_stay_until_their_certificates_expire_or_lack_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients keep working after a restart; token, key and names outlive certificates."""
    make(tmp_path)
    first = content(tmp_path)
    make(tmp_path)
    assert content(tmp_path) == first
    make(tmp_path, ["other.example"])
    second = content(tmp_path)
    assert second["ca.pem"] != first["ca.pem"]
    assert {name for name in first if first[name] == second[name]} == {
        "api-key", "api-keys.json", "service-token",
    }  # fmt: skip
    monkeypatch.setattr(secure_files, "_RENEW_BEFORE", dt.timedelta(days=400))
    files = make(tmp_path)
    assert content(tmp_path)["ca.pem"] != second["ca.pem"]
    renewed = x509.load_pem_x509_certificate(files.http_cert.read_bytes())
    names = renewed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "other.example" in names.get_values_for_type(x509.DNSName)


def test_damaged_pairs_are_made_again(tmp_path: Path) -> None:
    """A crash between two files does not leave services that cannot start."""
    files = make(tmp_path)
    files.http_key.write_bytes(files.service_key.read_bytes())
    damaged = content(tmp_path)
    make(tmp_path)
    assert content(tmp_path)["http.pem"] != damaged["http.pem"]


def test_up_secures_what_the_user_has_not_set(tmp_path: Path) -> None:
    """Flags of the user win over --secure; everything else is protected."""
    run_dir = f"--run-dir={tmp_path / 'run'}"
    settings, files = secured(load(LaunchSettings, ["--secure", run_dir]))
    assert settings.grpc_tls_require_client_cert
    assert settings.link_security().tokens is not None
    assert (settings.ssl_certfile, settings.api_key_file) == (files.http_cert, files.api_keys)
    assert {"grpc_tls_ca", "service_token_file", "ssl_keyfile"} <= settings.model_fields_set
    own = ["--api-key=mine", "--ssl-certfile=/own.pem", f"--service-token={'own' * 9}"]
    settings, _ = secured(load(LaunchSettings, ["--secure", run_dir, *own]))
    assert (settings.api_key_file, settings.service_token_file, settings.ssl_keyfile) == (None, None, None)
    assert settings.grpc_tls_ca == files.ca


@foreign_folders
def test_secrets_that_others_could_change_are_refused(foreign: Foreign, tmp_path: Path) -> None:
    """So is a file in the folder; its readers refuse it if others may write to it."""
    files = make(tmp_path / "run" / "secure")
    paths = CertificatePaths(files.ca, files.service_cert, files.service_key)
    for path, read in (
        (files.api_keys, lambda: read_key_file(files.api_keys)),
        (files.service_token, lambda: ServiceTokens(file=files.service_token)),
        (files.service_key, lambda: Certificates(paths)),
        (files.ca, lambda: Certificates(paths)),
    ):
        words = foreign(path)
        if path.stat().st_mode & 0o022:
            with pytest.raises(ConfigurationRefused, match=f"{path} belongs to {words}"):
                read()
        with pytest.raises(ConfigurationRefused, match=f"the secret {path} belongs to {words}"):
            make(files.folder)
        os.chown(path, os.geteuid(), 0)
        path.chmod(0o600)
    words = foreign(files.folder)
    with pytest.raises(ConfigurationRefused, match=f"secrets {files.folder} belongs to {words}"):
        secured(load(LaunchSettings, ["--secure", f"--run-dir={tmp_path / 'run'}"]))


def test_up_without_secure_has_a_token_alone(tmp_path: Path) -> None:
    """Only this user can read it; a later start, with `--secure` too, has the same; the user's own wins."""
    run_dir = f"--run-dir={tmp_path / 'run'}"
    settings, files = secured(load(LaunchSettings, [run_dir]))
    assert [path.name for path in files.folder.iterdir()] == ["service-token"]
    assert (files.folder.stat().st_mode & 0o777, files.service_token.stat().st_mode & 0o777) == (0o700, 0o600)
    assert settings.service_token_file == files.service_token
    assert (settings.grpc_tls_ca, settings.ssl_certfile, settings.api_key_file) == (None, None, None)
    token = files.service_token.read_text()
    secured(load(LaunchSettings, [run_dir, "--secure"]))
    assert files.service_token.read_text() == token
    settings, _ = secured(load(LaunchSettings, [run_dir, f"--service-token={'own' * 9}"]))
    assert settings.service_token_file is None


def test_the_command_prints_settings_and_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["secure-files", str(tmp_path), "--host", "10.0.0.5"]) == 0
    printed = capsys.readouterr().out
    assert f"TRIPTYCH_GRPC_TLS_CA={tmp_path}/ca.pem" in printed
    for secret in ("api-key", "service-token"):
        assert (tmp_path / secret).read_text().strip() not in printed


def test_a_host_that_no_certificate_can_have_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["secure-files", str(tmp_path), "--host", "münchen.example"]) == 2
    assert "--host: 'münchen.example' is not a host name in ASCII" in capsys.readouterr().err


def test_a_folder_of_others_is_not_the_hosts_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o777)
    assert cli.main(["secure-files", str(tmp_path), "--host", "10.0.0.5"]) == 2
    assert capsys.readouterr().err.startswith(
        f"triptych secure-files: the folder of secrets {tmp_path} belongs to"
    )


def test_a_machine_whose_name_has_other_letters_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its certificates are for the loopback; only a name that the user chose is refused."""
    monkeypatch.setattr("socket.gethostname", lambda: "münchen")
    settings, files = secured(load(LaunchSettings, ["--secure", f"--run-dir={tmp_path}"]))
    assert settings.ssl_certfile == files.http_cert
    with pytest.raises(ConfigurationRefused, match="münchen"):
        secured(load(LaunchSettings, ["--secure", f"--run-dir={tmp_path}", "--host=münchen"]))
