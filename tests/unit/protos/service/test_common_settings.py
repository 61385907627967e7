"""The settings that protect connections: what is refused, and that no refusal shows a secret."""

from pathlib import Path

import pytest

from gateway.settings import Settings as GatewaySettings
from protos.errors import ConfigurationRefused
from protos.service.common_settings import CallSecuritySettings
from protos.service.settings import load
from scheduler_svc.settings import Settings as SchedulerSettings
from tests.support.security.certificates import TOKEN, service_files

WORD = "a-secret"


def arguments(folder: Path, *names: str) -> list[str]:
    paths = service_files(folder)
    return [f"--grpc-tls-{name}={getattr(paths, name)}" for name in names]


def test_a_gateway_needs_the_ca_alone_and_a_scheduler_all_three_files(tmp_path: Path) -> None:
    alone, whole = (arguments(tmp_path, *names) for names in (("ca",), ("ca", "cert", "key")))
    assert load(GatewaySettings, alone).link_security().certificates is not None
    with pytest.raises(ConfigurationRefused, match="set --grpc-tls-cert and --grpc-tls-key"):
        load(SchedulerSettings, alone)
    security = load(SchedulerSettings, [*whole, "--grpc-tls-require-client-cert"]).link_security()
    assert security.require_client_cert
    assert load(SchedulerSettings, []).link_security().certificates is None


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--grpc-tls-cert=c"], "go together"),
        (["--grpc-tls-cert=c", "--grpc-tls-key=k"], "needs --grpc-tls-ca"),
        (["--grpc-tls-name=n"], "needs --grpc-tls-ca"),
        (["--grpc-tls-require-client-cert"], "needs TLS"),
        ([f"--service-token={WORD}", "--service-token-file=f"], "both set; set one"),
        ([f"--service-token={WORD}"], "16 to 512 printable"),
        ([f"--service-token={WORD} with spaces in it"], "16 to 512 printable"),
        (["--service-token-file={tmp}/none"], "cannot read"),
        (["--service-token-file={tmp}/short"], "a line of .*short is not a valid token"),
        (["--service-token-file={tmp}/empty"], "has no token"),
        (["--grpc-tls-ca={tmp}/none", "--grpc-tls-cert=c", "--grpc-tls-key=k"], "--grpc-tls-ca: cannot read"),
        (["--grpc-tls-ca={tmp}/short", "--grpc-tls-cert=c", "--grpc-tls-key=k"], "no PEM certificates"),
        (
            ["--grpc-tls-ca={ca}", "--grpc-tls-cert={cert}", "--grpc-tls-key={other}"],
            "not a PEM certificate and its",
        ),
    ],
)
def test_bad_settings_are_refused_in_a_line_without_secrets(
    flags: list[str], reason: str, tmp_path: Path
) -> None:
    paths, others = service_files(tmp_path / "a"), service_files(tmp_path / "b")
    (tmp_path / "short").write_text(f"{WORD}\n")
    (tmp_path / "empty").write_text("# nothing\n")
    places = {"tmp": tmp_path, "ca": paths.ca, "cert": paths.cert, "other": others.key}
    with pytest.raises(ConfigurationRefused, match=reason) as caught:
        load(SchedulerSettings, [flag.format(**places) for flag in flags]).link_security()
    assert "\n" not in caught.value.message
    assert WORD not in caught.value.message


def test_the_token_is_a_variable_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    from_file = load(CallSecuritySettings, [f"--service-token-file={tmp_path / 'token'}"]).link_security()
    monkeypatch.setenv("TRIPTYCH_SERVICE_TOKEN", TOKEN)
    settings = load(CallSecuritySettings, [])
    assert TOKEN not in repr(settings)
    for security in (from_file, settings.link_security()):
        assert security.tokens is not None
        assert security.tokens.accepts(f"Bearer {TOKEN}")
        assert not security.tokens.accepts(TOKEN)
        assert not security.tokens.accepts(f"Bearer {TOKEN}x")


def test_a_file_of_several_cas_may_have_comments(tmp_path: Path) -> None:
    paths, others = service_files(tmp_path / "a"), service_files(tmp_path / "b")
    paths.ca.write_bytes("# Müller\n".encode() + paths.ca.read_bytes() + others.ca.read_bytes())
    assert load(CallSecuritySettings, [f"--grpc-tls-ca={paths.ca}"]).link_security().certificates is not None
