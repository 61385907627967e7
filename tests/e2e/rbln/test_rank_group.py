"""Ranks join in the vendor's own process group."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.ports import free_port
from tests.support.rbln.rank_process import RANKS
from tests.support.rbln.vendor_packages import environment

pytestmark = [pytest.mark.npu, pytest.mark.e2e, pytest.mark.timeout(120)]


def joined(**variables: str) -> tuple[list[dict[str, Any]], str]:
    """Returns each rank's results and all output of the ranks."""
    master = f"127.0.0.2:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.rbln.rank_process", str(rank), master],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment(**variables),
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=100) for process in processes]
    written = "".join(output + error for output, error in outputs)
    assert [process.returncode for process in processes] == [0] * RANKS, written
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs], written


def test_ranks_sum_in_the_vendors_group() -> None:
    """The group refuses to exist under a default group of another backend."""
    results, written = joined()
    for rank, result in enumerate(results):
        assert result["default"] == result["stage"] == "rbln-ccl"
        assert result["sum"] == [3.0] * 4
        assert result["exchanged"] == ["0", "1"]
        assert result["variables"] == {
            "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "RBLN_CTX_STANDALONE": "1",
            "RBLN_ROOT_IP": "127.0.0.2", "RBLN_LOCAL_IP": "127.0.0.1",
        }  # fmt: skip
    assert "RBLN_RUNTIME_FORCE_SYNC" not in written


def test_addresses_that_are_set_remain() -> None:
    """The host of one rank may have several addresses. A synchronous runtime is reported."""
    results, written = joined(RBLN_LOCAL_IP="127.0.0.9", RBLN_RUNTIME_FORCE_SYNC="1")
    for result in results:
        assert result["variables"]["RBLN_ROOT_IP"] == "127.0.0.2"
        assert result["variables"]["RBLN_LOCAL_IP"] == "127.0.0.9"
    assert written.count("unset RBLN_RUNTIME_FORCE_SYNC") == RANKS
