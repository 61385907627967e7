"""Each contract test starts from a fake scheduler without requests and faults, and reconnects quickly."""

import pytest

from gateway.scheduler_client import connection
from tests.support.gateway.serving import Stack


@pytest.fixture
def stack(running: Stack) -> Stack:
    """The module's gateway; its scheduler has forgotten earlier tests."""
    running.scheduler.reset()
    return running


@pytest.fixture(autouse=True)
def short_reconnect_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the pause before a reconnect short, however often a module's tests break the stream."""
    monkeypatch.setattr(connection, "_LONGEST_PAUSE_S", 0.1)
