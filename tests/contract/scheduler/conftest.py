"""A running scheduler with one fake worker. A test file overrides the parts that differ."""

from collections.abc import AsyncIterator

import pytest

from scheduler_svc.settings import Settings
from tests.support.scheduler.fake_worker import FakeWorker
from tests.support.scheduler.running_scheduler import (
    RunningScheduler,
    joined,
    run_scheduler,
)


@pytest.fixture
def settings() -> Settings:
    """The scheduler's settings."""
    return Settings()


@pytest.fixture
def worker() -> FakeWorker:
    """The worker that has joined the scheduler."""
    return FakeWorker()


@pytest.fixture
def replica_id() -> str:
    """The id of that worker."""
    return "w"


@pytest.fixture
async def scheduler(
    settings: Settings, worker: FakeWorker, replica_id: str
) -> AsyncIterator[RunningScheduler]:
    """A scheduler that serves with one worker."""
    async with run_scheduler(settings) as running, joined(running, worker, replica_id):
        yield running
