"""A test that hangs is ended, also one that runs on uvloop."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

HANGS = """
import asyncio
import pytest

@pytest.mark.timeout(1)
async def test_that_hangs():
    while True:
        try:
            await asyncio.Event().wait()
        except BaseException:
            pass
"""


@pytest.mark.slow
def test_a_contract_test_that_hangs_is_ended(tmp_path: Path) -> None:
    """The process ends, and says where each thread stands."""
    contract = tmp_path / "contract"
    contract.mkdir()
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    shutil.copy(ROOT / "tests/contract/conftest.py", contract)
    (contract / "test_hangs.py").write_text(HANGS)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "-p", "no:cacheprovider", contract],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "Timeout (0:00:11)" in ended.stdout
    assert "pytest_asyncio" in ended.stdout
