"""Work in Python has a limit of CPU time, wherever it runs."""

import contextlib
import threading
import time

import pytest

from gateway.text.cpu_time import OutOfCpuTime, limited


def spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_work_out_of_time_is_interrupted_and_its_thread_goes_on() -> None:
    """Handlers of ordinary errors within it change nothing; later work of the thread is left alone."""
    with pytest.raises(OutOfCpuTime), limited(0.1), contextlib.suppress(Exception):
        spin(30)
    with limited(5):
        spin(1.2)


def test_an_inner_limit_counts_apart() -> None:
    """An inner limit interrupts the inner work; the outer goes on."""
    with limited(30):
        with pytest.raises(OutOfCpuTime), limited(0.1):
            spin(30)
        spin(0.7)


def test_waiting_is_not_work() -> None:
    """Only CPU time counts: a thread that waits is never interrupted."""
    with limited(0.3):
        assert not threading.Event().wait(1.2)
