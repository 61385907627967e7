"""When `triptych bench` sends its requests."""

from itertools import pairwise

import pytest

from deploy.client.load import Pace


@pytest.mark.parametrize("burstiness", [0.02, 0.1, 1.0, 5.0, 1e308, float("inf")])
def test_the_last_of_n_requests_leaves_after_n_over_rate(burstiness: float) -> None:
    """Whatever the intervals are, the rate of the whole run is the one that was asked for."""
    due = Pace(4.0, None, 7, burstiness).schedule_s(20)
    assert due == sorted(due)
    assert due[-1] == pytest.approx(5.0)


def test_burstiness_shapes_the_intervals() -> None:
    """Infinite burstiness makes them equal, less spreads them more, and a seed repeats them."""

    def spread(burstiness: float) -> float:
        due = Pace(1.0, None, 7, burstiness).schedule_s(50)
        return max(late - early for early, late in pairwise([0.0, *due]))

    assert spread(float("inf")) == pytest.approx(1.0)
    assert spread(0.1) > spread(1.0) > spread(10.0) > 1.0
    assert spread(1.0) == spread(1.0)


def test_without_a_rate_all_requests_leave_at_once() -> None:
    """Burstiness changes nothing then."""
    assert Pace(float("inf"), None, burstiness=0.5).schedule_s(3) == [0.0, 0.0, 0.0]
