"""Checks of folders, and of certificates and keys."""

from pathlib import Path

import pytest

from deploy.diagnosis.findings import Finding, Findings, Missing, Remark
from deploy.inspection import host, security
from deploy.launcher.run_dir import claim
from gateway.settings import Settings
from tests.support.security import certificates


def test_a_run_folder_in_use_is_named_and_left_alone(tmp_path: Path) -> None:
    """The doctor removes no log of an earlier launcher, and sees the one that runs."""
    log = tmp_path / "worker-0.log"
    log.touch()
    assert host.run_folder(tmp_path).startswith(str(tmp_path))
    assert log.exists()
    with claim(tmp_path), pytest.raises(Missing, match=r"is in use by another launcher \(pid \d+\)"):
        host.run_folder(tmp_path)
    assert host.run_folder(tmp_path / "new" / "folder").startswith(str(tmp_path / "new" / "folder"))
    assert not (tmp_path / "new").exists()


def secured(**settings: object) -> dict[str, Finding]:
    """Returns the findings about a gateway's certificates and keys."""
    found: list[Finding] = []
    security.check(Settings(**settings), Findings(found.append))  # type: ignore[arg-type]
    return {finding.name: finding for finding in found}


def test_certificates_and_keys_are_read(tmp_path: Path) -> None:
    """What is configured is checked, and a file that is missing or damaged fails."""
    paths = certificates.service_files(tmp_path / "tls")
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [")
    found = secured(ssl_certfile=paths.cert, ssl_keyfile=paths.key, grpc_tls_ca=paths.ca, api_key_file=keys)
    assert {name: finding.status for name, finding in found.items()} == {
        "certificate": "ok",
        "key file": "FAILED",
        "service links": "ok",
    }
    assert secured(ssl_certfile=tmp_path / "missing")["certificate"].status == "FAILED"
    assert secured(ssl_certfile=paths.ca)["certificate"].status == "FAILED"
    assert not secured()


@pytest.mark.parametrize(
    ("device", "level", "expected", "text"),
    [
        ("cpu", 1, Remark, "own CPU kernels must be in the image"),
        ("cpu", 2, Missing, "-O 2 generates C"),
        ("cuda", 2, Missing, "Triton compiles its launchers with a C compiler"),
    ],
)
def test_a_missing_compiler_matters_where_code_is_generated(
    device: str, level: int, expected: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that names one is enough."""
    monkeypatch.setenv("PATH", "/nowhere")
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(expected, match=text):
        host.compiler(device, level)
    monkeypatch.setenv("CXX" if device == "cpu" else "CC", "/opt/compiler")
    assert host.compiler(device, level) == "/opt/compiler"
