"""The compiled kernels for CPUs, which tests of their operations share."""

import pytest

from worker_svc.devices.cpu.kernels import build
from worker_svc.devices.cpu.kernels.program import Kernels


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    """The loaded kernels; skips the test if they are unavailable."""
    try:
        return Kernels(build.library())
    except build.KernelsUnavailable as error:
        pytest.skip(f"the kernels are unavailable: {error}")
