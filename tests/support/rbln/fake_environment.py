"""Processes that find fakes of the vendor's packages for NPUs; see `tests/support/rbln/fakes`.

They are processes of their own because torch can have one such device, for good.
"""

import os

from tests.support.paths import ROOT

PACKAGES = ROOT / "tests" / "support" / "rbln" / "fakes"


def environment(**changed: str) -> dict[str, str]:
    """Returns this process's environment with the fakes on Python's path, and one thread."""
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{PACKAGES}", "OMP_NUM_THREADS": "1", **changed}
