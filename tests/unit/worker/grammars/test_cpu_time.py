"""A pass over a step's rows is measured as a whole, and its time divided among the rows."""

import time

import pytest

from worker_svc.grammars.cpu_time import BatchClock


def burn(seconds: float) -> None:
    """Uses CPU time."""
    started = time.thread_time()
    while time.thread_time() - started < seconds:
        pass


def test_a_short_pass_is_free() -> None:
    """No row is charged for a pass that stays within one token's allowance."""
    clock = BatchClock()
    clock.laps += [time.perf_counter(), time.perf_counter()]
    assert list(clock.shares()) == []


def test_a_slow_row_has_the_time() -> None:
    """The parts add up to the pass's CPU time, nearly all of it the slow row's."""
    before, clock = time.thread_time(), BatchClock()
    clock.laps.append(time.perf_counter())
    burn(0.05)
    clock.laps.append(time.perf_counter())
    clock.laps.append(time.perf_counter())
    shares = clock.shares()
    spent = time.thread_time() - before
    assert len(shares) == 3
    assert sum(shares) == pytest.approx(spent, rel=0.1)
    assert shares[1] > 0.8 * spent
