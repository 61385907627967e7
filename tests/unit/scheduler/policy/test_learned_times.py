"""Seconds of steps as a linear function of their size, learned from results."""

import random

import pytest

from scheduler_svc.policy.learned_times import LearnedTimes, LinearTime


def learned(*observations: tuple[float, float]) -> LinearTime:
    times = LinearTime()
    for size, seconds in observations:
        times.observe(size, seconds)
    return times


def test_a_line_is_found_from_its_points() -> None:
    """Base and slope, with noise of a tenth."""
    dice = random.Random(1)
    sizes = [dice.randint(1, 64) for _ in range(300)]
    times = learned(*((size, (0.01 + 0.001 * size) * dice.uniform(0.9, 1.1)) for size in sizes))
    assert times.slope == pytest.approx(0.001, rel=0.1)
    assert [times.at(size) for size in (1, 64)] == pytest.approx([0.011, 0.074], rel=0.1)


def test_one_size_says_nothing_of_the_slope() -> None:
    """All sizes then take equally long, as padded steps do."""
    times = learned(*[(512, 0.02)] * 5)
    assert times.slope == 0
    assert times.at(1) == times.at(4096) == pytest.approx(0.02)


def test_a_compilation_leaves_no_trace() -> None:
    """Neither before the usual steps nor among them."""
    usual = [(8, 0.01)] * 30
    assert learned((8, 60.0), *usual).at(8) == pytest.approx(0.01)
    assert learned(*usual, (8, 60.0), *usual).at(8) < 0.012


def test_a_device_that_becomes_slower_or_faster_is_followed() -> None:
    """Within two hundred steps."""
    for before, after in ((0.01, 0.03), (0.03, 0.02)):
        assert learned(*[(8, before)] * 100, *[(8, after)] * 200).at(8) == pytest.approx(after, rel=0.05)


def test_a_step_without_a_measurement_is_ignored() -> None:
    assert not learned((8, 0.0)).known


def test_a_bucket_without_a_time_is_taken_for_the_next_smaller_one() -> None:
    """So it is tried; a line through 64 and 512 tokens would say 12.6 ms for 256."""
    times = LearnedTimes()
    assert times.of_bucket(256) == 0
    times.observe_chunk(500, 512, 0.021)
    assert times.of_bucket(256) == pytest.approx(0.021)
    times.observe_chunk(64, 64, 0.006)
    assert times.of_bucket(256) == pytest.approx(0.006)
    times.observe_chunk(200, 256, 0.011)
    assert [times.of_bucket(size) for size in (64, 256, 512)] == pytest.approx([0.006, 0.011, 0.021])
