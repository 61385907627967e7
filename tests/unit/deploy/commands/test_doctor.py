"""`triptych doctor` in a process of its own, as vLLM loads one platform per process."""

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.rbln.fake_environment import PACKAGES


def doctor(*flags: str, path: str = "") -> tuple[int, dict[str, tuple[str, str]]]:
    """Returns the exit code and each check's status and text."""
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli", "doctor", *flags], check=False, capture_output=True, text=True,
        cwd=ROOT, timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), path)))},
    )  # fmt: skip
    lines = [
        line for line in done.stdout.splitlines() if line[:8].strip() in ("ok", "note", "FAILED", "skipped")
    ]
    assert lines, done.stderr
    return done.returncode, {line[8:28].strip(): (line[:8].strip(), line[28:]) for line in lines}


@pytest.mark.parametrize(
    "flags", [("--device", "cpu"), ("--device", "rbln", "--rbln-backend", "rbln-check")], ids=" ".join
)
def test_a_machine_that_can_serve_passes(flags: tuple[str, ...]) -> None:
    """Graph and attention really run, and equal the CPU's results."""
    code, found = doctor(*flags)
    assert code == 0
    assert {status for status, _ in found.values()} <= {"ok", "note"}
    for name in ("graph", "attention"):
        assert "differs from the CPU by" in found[name][1]


def test_missing_vendor_packages_are_one_failure() -> None:
    """Without an NPU's software the first missing thing fails, with advice; what needs it is skipped."""
    code, found = doctor("--device", "rbln")
    assert code == 1
    status, text = found["vendor packages"]
    assert status == "FAILED"
    assert "rebel and torch_rbln" in text
    assert "install rebel-compiler" in text
    assert found["device"][0] == found["graph"][0] == "skipped"


def test_the_vendors_stack_is_checked() -> None:
    """With fakes of the vendor's packages, the checks run through the code that an NPU would meet."""
    code, found = doctor("--device", "rbln", path=str(PACKAGES))
    assert {name for name, (status, _) in found.items() if status in ("FAILED", "skipped")} == set()
    assert code == 0
    assert found["tensors"][1] == "copied to rbln and back"
    assert "copied with tensors" in found["copies"][1]
    assert "attention operators and custom_moe_glu" in found["operators"][1]
