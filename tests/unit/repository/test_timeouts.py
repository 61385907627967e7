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

{marker}
async def test_that_hangs():
    while True:
        try:
            await asyncio.Event().wait()
        except BaseException:
            pass
"""


@pytest.mark.parametrize("marker", ["", "@pytest.mark.timeout(2)"])
def test_a_contract_test_that_hangs_is_ended(marker: str, tmp_path: Path) -> None:
    """The process ends, and says where each thread stands; the marker of a test keeps its seconds."""
    shutil.copy(ROOT / "tests/contract/conftest.py", tmp_path)
    (tmp_path / "test_hangs.py").write_text(HANGS.format(marker=marker))
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "-p", "no:cacheprovider",
         f"--timeout={600 if marker else 2}", tmp_path],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "Timeout" in ended.stdout
    assert "run_until_complete" in ended.stdout
