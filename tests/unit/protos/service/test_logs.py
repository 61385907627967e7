"""Logs that cannot be written cost nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

FULL_DISK = Path("/dev/full")
CODE = """
import logging
from protos.service.logs import configure, get_logger
configure("gateway", log_format="{log_format}")
for number in range(2000):
    get_logger().info("step", number=number)
    logging.getLogger("library").warning("a warning")
print("served")
"""


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_full_disk_does_not_stop_a_service(log_format: str) -> None:
    """Lines are dropped; the code that logs goes on."""
    code = CODE.replace("{log_format}", log_format)
    with FULL_DISK.open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            check=False,
        )
    assert done.stdout == "served\n"


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_values_stay_on_their_line_and_move_no_cursor(log_format: str) -> None:
    """A client's id may have any characters."""
    code = (
        "from protos.service.logs import configure, get_logger\n"
        f"configure('scheduler', log_format={log_format!r})\n"
        "get_logger().info('request', request_id='a\\x1b[2Kb\\nforged \u00e9')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    assert line.isprintable()
    assert "forged" in line
