"""`triptych compose-files` in a checkout; tests/e2e/deploy/test_wheel.py runs it from a wheel."""

from importlib.metadata import PathDistribution
from pathlib import Path
from zipfile import ZipFile

import pytest

from deploy import cli
from deploy.commands.deployment_files import write_wheel

RECORD = """\
../../bin/pet,sha256=a,1
pet/__init__.py,sha256=b,2
pet/__pycache__/__init__.cpython-311.pyc,,
pet-1.0.dist-info/INSTALLER,sha256=c,3
pet-1.0.dist-info/METADATA,sha256=d,4
pet-1.0.dist-info/RECORD,,
pet-1.0.dist-info/REQUESTED,sha256=e,0
pet-1.0.dist-info/direct_url.json,sha256=f,5
"""


def test_a_checkout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compose-files", str(tmp_path / "out")]) == 1
    assert "a checkout has them already, in " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_installed_distribution_becomes_its_wheel_again(tmp_path: Path) -> None:
    """The wheel has the packaged files and their hashes, and nothing that the installation made."""
    info = tmp_path / "site" / "pet-1.0.dist-info"
    info.mkdir(parents=True)
    (tmp_path / "site" / "pet").mkdir()
    (tmp_path / "site" / "pet" / "__init__.py").write_text("x = 1\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pet\nVersion: 1.0\n")
    (info / "RECORD").write_text(RECORD)
    for name in ("INSTALLER", "REQUESTED", "direct_url.json"):
        (info / name).touch()
    path = write_wheel(PathDistribution(info), tmp_path)
    assert path.name == "pet-1.0-py3-none-any.whl"
    with ZipFile(path) as wheel:
        assert wheel.namelist() == [
            "pet/__init__.py",
            "pet-1.0.dist-info/METADATA",
            "pet-1.0.dist-info/RECORD",
        ]
        assert wheel.read("pet/__init__.py") == b"x = 1\n"
        assert wheel.read("pet-1.0.dist-info/RECORD").decode().splitlines() == [
            "pet/__init__.py,sha256=b,2", "pet-1.0.dist-info/METADATA,sha256=d,4", "pet-1.0.dist-info/RECORD,,"
        ]  # fmt: skip
