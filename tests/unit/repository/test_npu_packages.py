"""Tests that need the vendor's packages for NPUs, without a package index."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

# Runs tests as if nothing had been downloaded, and counts the questions to an index.
RUN = """
import subprocess, sys
from pathlib import Path
import pytest
from tests.support.rbln import vendor_packages, wheels

run = subprocess.run
def count(command, **options):
    print("asked" if "download" in command else "", flush=True)
    return run(command, **options)

wheels.subprocess.run = count
wheels.CACHE = vendor_packages._CACHE = Path(sys.argv[1])
sys.exit(pytest.main(["-q", "-s", "-p", "no:cacheprovider", "tests/contract/worker/test_rbln_wheels.py"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("required", [False, True])
def test_without_an_index_they_are_skipped_but_not_in_ci(
    required: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index is asked once."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("REQUIRE_NPU_PACKAGES", raising=False)
    if required:
        monkeypatch.setenv("REQUIRE_NPU_PACKAGES", "1")
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)], check=False, capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.count("asked") == 1, done.stdout
    summary = done.stdout.splitlines()[-1]
    assert ("error" in summary) == required
    assert ("skipped" in summary) == (not required)
    assert done.returncode == int(required)
