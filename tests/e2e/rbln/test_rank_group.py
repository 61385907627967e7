"""Ranks join in the vendor's own process group."""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from subprocess import Popen, TimeoutExpired
from typing import Any

import pytest

from tests.support.ports import free_port
from tests.support.rbln.rank_process import RANKS
from tests.support.rbln.vendor_packages import outputs_of, running_ranks

pytestmark = [pytest.mark.npu, pytest.mark.e2e, pytest.mark.timeout(240)]


def started(*variables: Mapping[str, str]) -> AbstractContextManager[list[Popen[str]]]:
    """Starts a rank for each set of variables."""
    master = f"127.0.0.2:{free_port()}"
    return running_ranks(
        "tests.support.rbln.rank_process",
        [((str(rank), master), given) for rank, given in enumerate(variables)],
    )


def joined(*variables: Mapping[str, str]) -> tuple[list[dict[str, Any]], str]:
    """Returns each rank's results and all output of the ranks."""
    with started(*variables) as processes:
        outputs = outputs_of(processes)
        written = "".join(output + error for output, error in outputs)
        assert [process.returncode for process in processes] == [0] * RANKS, written
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs], written


def test_ranks_sum_in_the_vendors_group() -> None:
    """It refuses to exist under a default group of another backend, and sums float16 alone on the NPUs."""
    results, written = joined({}, {})
    for rank, result in enumerate(results):
        assert result["default"] == result["stage"] == ["ProcessGroupRBLN", "ProcessGroupRBLN"]
        assert result["collected"] == [3.0, 3.0, 1.0, 1.0, 2.0, 2.0]
        assert result["exchanged"] == ["0", "1"]
        assert result["variables"] == {
            "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "RBLN_CTX_STANDALONE": "1",
            "RBLN_ROOT_IP": "127.0.0.2", "RBLN_LOCAL_IP": "127.0.0.1",
        }  # fmt: skip
    assert written.count("stub rccl ran: all-reduce") == written.count("stub rccl ran: all-gather") == RANKS
    assert "RBLN_RUNTIME_FORCE_SYNC" not in written


def test_addresses_that_are_set_remain() -> None:
    """A host may have several, here 127.0.0.2 and 127.0.0.3. A synchronous runtime is reported."""
    addresses = ("127.0.0.2", "127.0.0.3")
    results, written = joined(
        *({"RBLN_LOCAL_IP": each, "RBLN_RUNTIME_FORCE_SYNC": "1"} for each in addresses)
    )
    for result, address in zip(results, addresses, strict=True):
        assert result["variables"]["RBLN_ROOT_IP"] == "127.0.0.2"
        assert result["variables"]["RBLN_LOCAL_IP"] == address
    assert written.count("unset RBLN_RUNTIME_FORCE_SYNC") == RANKS


@pytest.mark.slow
def test_another_address_of_rank_0_is_found() -> None:
    """Ranks get rank 0's address from the vendor's package, with the group's identity."""
    with started({}, {"RBLN_ROOT_IP": "127.0.0.9", "RBLN_LOCAL_IP": "127.0.0.3"}) as processes:
        (_, errors) = outputs_of(processes[1:])[0]
        assert "stub rccl: rank 0 is at 127.0.0.2, and RBLN_ROOT_IP is 127.0.0.9" in errors


def test_no_rank_outlasts_its_test() -> None:
    """A rank waits longer for the others than a test does."""
    with pytest.raises(TimeoutExpired), started({}) as processes:
        outputs_of(processes, 1)
    assert processes[0].returncode == -9
