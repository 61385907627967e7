"""Failed steps in a row, and the pauses that they cost."""

import pytest

from protos.errors import Unavailable
from scheduler_svc.workers.losses import FailedSteps


def test_only_steps_in_a_row_count() -> None:
    """A step that succeeds clears the count."""
    steps = FailedSteps(2)
    for _ in range(5):
        steps.failed("broken")
        assert steps.failing
        steps.check()
        steps.succeeded()
        assert not steps.failing
    steps.failed("broken")
    with pytest.raises(Unavailable, match="2 steps failed in a row, the last with: gone"):
        steps.failed("gone")


def test_pauses_double_up_to_a_minute() -> None:
    """Each failed step beyond the limit doubles the pause before the next registration."""
    now = 0.0
    steps = FailedSteps(1, clock=lambda: now)
    for expected_s in (1, 2, 4, 8, 16, 32, 60, 60):
        with pytest.raises(Unavailable):
            steps.failed("broken")
        now += expected_s - 0.5
        with pytest.raises(Unavailable) as caught:
            steps.check()
        assert caught.value.retry_after_ms == 500
        now += 0.5
        steps.check()


def test_a_worker_is_not_avoided_for_long_after_one_failed_step() -> None:
    """A healthy worker with one bad request gets requests again; the more failed in a row, the later."""
    now = 0.0
    steps = FailedSteps(5, lambda: now)
    for in_a_row, avoided_s in ((1, 1.0), (2, 2.0), (3, 4.0)):
        steps.failed("bad")
        assert steps.in_a_row == in_a_row
        now += avoided_s - 0.1
        assert steps.failing
        now += 0.2
        assert not steps.failing
