"""A fake scheduler, and a port at which it does not listen yet."""

import pytest

from tests.support.gateway.fake_scheduler import FakeScheduler, serving
from tests.support.gateway.serving import smollm2_folder


@pytest.fixture
def scheduler() -> FakeScheduler:
    """Generates 20 tokens, and answers pooling requests with four values."""
    return FakeScheduler(smollm2_folder(), list(range(100, 120)), pooled_size=4)


@pytest.fixture
async def port(scheduler: FakeScheduler) -> int:
    """A port at which no scheduler listens yet."""
    async with serving(scheduler) as server:
        return server.port
