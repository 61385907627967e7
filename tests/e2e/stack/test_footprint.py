"""The torch-free services start quickly and stay small, measured with the bench's functions."""

import psutil
import pytest

from tests.bench.footprint import LIMITS_MIB, READY_LIMIT_S, time_to_ready
from tests.support.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.stack]


@pytest.mark.parametrize("package", ["scheduler_svc", "gateway"])
def test_a_torch_free_service_is_ready_within_three_seconds(package: str) -> None:
    """One of two starts is enough, because the first may have to read the disk."""
    assert any(time_to_ready(package) < READY_LIMIT_S for _ in range(2))


@pytest.mark.parametrize("service", ["scheduler", "gateway"])
def test_a_torch_free_service_stays_small(stack: Stack, service: str) -> None:
    """The resident memory stays under its limit while the stack serves SmolLM2."""
    resident_mib = psutil.Process(stack.pid(service)).memory_info().rss / 2**20
    assert resident_mib < LIMITS_MIB[service]
