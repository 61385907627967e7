"""The torch-free services are small and quick to be ready, measured as the bench measures."""

import psutil
import pytest

from tests.bench.footprint import LIMITS_MIB, READY_LIMIT_S, time_to_ready
from tests.e2e.conftest import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.stack]


@pytest.mark.parametrize("package", ["scheduler_svc", "gateway"])
def test_a_torch_free_service_is_ready_within_three_seconds(package: str) -> None:
    """The better of two starts: the first one may have to read the disk."""
    assert min(time_to_ready(package) for _ in range(2)) < READY_LIMIT_S


@pytest.mark.parametrize("service", ["scheduler", "gateway"])
def test_a_serving_stack_s_torch_free_services_stay_small(stack: Stack, service: str) -> None:
    """Resident memory while SmolLM2 is served."""
    resident_mib = psutil.Process(stack.pid(service)).memory_info().rss / 2**20
    assert resident_mib < LIMITS_MIB[service]
