"""Tests leave a stack alone that answers on its default ports."""

import contextlib
import socket
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(300)]

PORTS = (8000, 50051, 50061)
"""Of gateway, scheduler and worker."""

FILES = (
    "tests/contract/worker/test_watchdog.py",
    "tests/contract/scheduler/test_process.py",
    "tests/e2e/worker/test_service.py::test_a_bad_setting_is_one_line_and_code_2",
    "tests/e2e/worker/test_service.py::test_an_absent_device_is_one_line_and_code_2",
    "tests/e2e/worker/test_checkpoint_cases.py::test_a_worker_ends_with_the_line",
)
"""Tests that start workers and schedulers."""


def test_tests_connect_to_no_default_port() -> None:
    """The listening sockets stay without a connection, and the tests pass."""
    with contextlib.ExitStack() as stack:
        try:
            sockets = [stack.enter_context(socket.create_server(("127.0.0.1", port))) for port in PORTS]
        except OSError as error:
            pytest.skip(f"another process has a default port: {error}")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *FILES]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        for each in sockets:
            each.setblocking(False)  # accept raises if no connection waits
            with pytest.raises(BlockingIOError):
                each.accept()
