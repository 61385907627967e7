"""The vendor's process group over the stub's collectives, with real processes."""

import subprocess
from contextlib import AbstractContextManager

import pytest

from tests.support.ports import free_port
from tests.support.rbln.vendor_packages import outputs_of, running_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.npu, pytest.mark.timeout(240)]


def started(
    scenario: str, ranks: int, **variables: str
) -> AbstractContextManager[list[subprocess.Popen[str]]]:
    """Starts the ranks; `variables` change the vendor's."""
    port = free_port()
    needed = {"WORLD_SIZE": str(ranks), "RCCL_PORT_GEN": "1", "STUB_RBLN_CCL_LIMIT_S": "60"} | variables
    return running_ranks(
        "tests.support.rbln.collective_process",
        [
            ((scenario, *map(str, (rank, ranks, port))), {"LOCAL_RANK": str(rank), **needed})
            for rank in range(ranks)
        ],
    )


@pytest.mark.parametrize(
    ("scenario", "ranks"),
    [
        ("collectives", 2),
        pytest.param("collectives", 4, marks=pytest.mark.slow),
        ("messages", 2),
        pytest.param("messages", 4, marks=pytest.mark.slow),
        pytest.param("subgroups", 4, marks=pytest.mark.slow),
        pytest.param("rounding", 2, marks=pytest.mark.slow),
    ],
)
def test_collectives_equal_plain_sums(scenario: str, ranks: int) -> None:
    """All types, sizes below and above the vendor's units and limits, groups of some ranks."""
    with started(scenario, ranks) as processes:
        errors = [error for _, error in outputs_of(processes)]
        assert [process.returncode for process in processes] == [0] * ranks, errors


@pytest.mark.slow
@pytest.mark.parametrize("killed", [True, False])
def test_the_others_fail_without_a_rank(killed: bool) -> None:
    """A dead rank is found at once, a silent one at the limit."""
    limit = {} if killed else {"STUB_RBLN_CCL_LIMIT_S": "5"}
    with started("absent", 3, **limit) as processes:
        first, lost, last = processes
        for process in processes:
            assert process.stdout is not None
            while (line := process.stdout.readline()) and line != "joined\n":
                pass
        if killed:
            lost.kill()
        for _, errors in outputs_of((first, last), 60):
            assert "AllReduce failed" in errors
        assert 0 not in (first.returncode, last.returncode)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "variables"),
    [("different", {}), ("collectives", {"WORLD_SIZE": "3"}), ("collectives", {"RCCL_PORT_GEN": ""})],
)
def test_misuse_is_refused(scenario: str, variables: dict[str, str]) -> None:
    """Calls that differ among ranks, and a start without the variables of the vendor's plugin."""
    with started(scenario, 2, **variables) as processes:
        for _, errors in outputs_of(processes):
            assert "stub rccl: " in errors
        assert 0 not in [process.returncode for process in processes]
