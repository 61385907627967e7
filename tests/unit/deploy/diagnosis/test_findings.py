"""What `triptych doctor` makes of the results of its checks."""

from pathlib import Path

import pytest

from deploy.diagnosis import machine
from deploy.diagnosis.findings import Finding, Findings, Missing, Remark


def raising(error: Exception) -> str:
    raise error


def test_a_check_that_needs_a_failed_one_is_skipped() -> None:
    """One cause gives one failure; a note breaks nothing; any error is a result of one line."""
    shown: list[Finding] = []
    findings = Findings(shown.append)
    findings.check("first", lambda: "found")
    findings.check("note", lambda: raising(Remark("could be better")), needs=("first",))
    findings.check("driver", lambda: raising(OSError("broken\nin detail")), needs=("note",))
    findings.check("device", lambda: pytest.fail("must not run"), needs=("driver",))
    findings.check("graph", lambda: pytest.fail("must not run"), needs=("device",))
    assert [(each.name, each.status, each.text) for each in shown] == [
        ("first", "ok", "found"),
        ("note", "note", "could be better"),
        ("driver", "FAILED", "OSError: broken"),
        ("device", "skipped", "needs: driver"),
        ("graph", "skipped", "needs: device"),
    ]
    assert findings.num_failed == 1


def test_a_missing_package_is_named() -> None:
    """Alternatives count as one; the advice is a command."""
    assert machine.packages("pytest").startswith("pytest ")
    assert machine.packages("no-such-package|pytest").startswith("pytest ")
    with pytest.raises(Missing, match="no-such-package not installed; run `triptych install worker`"):
        machine.packages("pytest", "no-such-package")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A file in the folder's place is found before a worker compiles for an hour."""
    (tmp_path / "file").touch()
    with pytest.raises(Missing, match="cannot be written"):
        machine.cache_folder(tmp_path / "file" / "folder")
    assert not list(tmp_path.glob("folder"))
