"""A running scheduler with three shapes, and one worker with a pooling model."""

import pytest

from scheduler_svc.settings import Settings
from tests.support.scheduler.fake_pool_worker import FakePoolWorker


@pytest.fixture
def settings() -> Settings:
    """Settings with three shapes."""
    return Settings(pool_batch_sizes=(1, 4, 2), pool_prompt_lens=(4, 4, 16))


@pytest.fixture
def worker() -> FakePoolWorker:
    """A worker with a pooling model."""
    return FakePoolWorker()
