"""Device rbln calls operators as the vendor's own code does; see `tests/support/rbln/oracle.py`."""

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.property_settings import drawn_seed

pytestmark = [pytest.mark.contract, pytest.mark.npu, pytest.mark.timeout(300)]


def test_calls_operators_and_buckets_are_the_vendor_s() -> None:
    seed = f"--hypothesis-seed={drawn_seed()}"
    print(seed)
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", seed,
            "tests/support/rbln/oracle.py",
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False, capture_output=True, text=True, cwd=ROOT, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
