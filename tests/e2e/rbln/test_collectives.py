"""The vendor's process group over the stub's collectives, with real processes."""

import subprocess
import sys

import pytest

from tests.support.ports import free_ports
from tests.support.rbln.vendor_packages import environment

pytestmark = [pytest.mark.e2e, pytest.mark.npu, pytest.mark.timeout(120)]


def start(scenario: str, ranks: int, **variables: str) -> list[subprocess.Popen[str]]:
    """Starts the ranks; `variables` change the vendor's."""
    (port,) = free_ports(1)
    module = "tests.support.rbln.collective_process"
    needed = {"WORLD_SIZE": str(ranks), "RCCL_PORT_GEN": "1"} | variables
    return [
        subprocess.Popen(
            [sys.executable, "-m", module, scenario, *map(str, (rank, ranks, port))],
            env=environment(LOCAL_RANK=str(rank), **needed),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip


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
    for process in start(scenario, ranks):
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors


@pytest.mark.slow
@pytest.mark.parametrize("killed", [True, False])
def test_the_others_fail_without_a_rank(killed: bool) -> None:
    """A dead rank is found at once, a silent one at the limit."""
    limit = {} if killed else {"STUB_RBLN_CCL_LIMIT_S": "5"}
    processes = start("absent", 3, **limit)
    lost, others = processes[1], [processes[0], processes[2]]
    for process in processes:
        assert process.stdout is not None
        while (line := process.stdout.readline()) and line != "joined\n":
            pass
    if killed:
        lost.kill()
    for other in others:
        _, errors = other.communicate(timeout=30)
        assert other.returncode != 0
        assert "AllReduce failed" in errors
    lost.kill()
    lost.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "variables"),
    [("different", {}), ("collectives", {"WORLD_SIZE": "3"}), ("collectives", {"RCCL_PORT_GEN": ""})],
)
def test_misuse_is_refused(scenario: str, variables: dict[str, str]) -> None:
    """Calls that differ among ranks, and a start without the variables of the vendor's plugin."""
    for process in start(scenario, 2, **variables):
        _, errors = process.communicate(timeout=100)
        assert process.returncode != 0
        assert "stub rccl: " in errors
