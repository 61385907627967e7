"""Every contract test starts from a fake scheduler without requests and faults."""

import pytest

from tests.support.gateway.serving import Stack


@pytest.fixture
def stack(running: Stack) -> Stack:
    """The module's gateway; its scheduler has forgotten earlier tests."""
    running.scheduler.reset()
    return running
