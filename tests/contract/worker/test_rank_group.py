"""Ranks that join their group, in processes of their own."""

import json
import socket
import subprocess
import sys
from collections.abc import Mapping

import pytest

from tests.support.ports import free_ports

pytestmark = [pytest.mark.contract, pytest.mark.timeout(120)]


def start(rank: int, port: int, facts: Mapping[str, str], *, join_s: float = 60) -> subprocess.Popen[str]:
    """Starts a rank that joins."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.ranks.joining_rank", str(rank), f"127.0.0.1:{port}", json.dumps(facts), str(join_s)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def printed(*ranks: subprocess.Popen[str]) -> list[str]:
    """Waits for ranks; returns the last line of each."""
    return [rank.communicate(timeout=100)[0].splitlines()[-1] for rank in ranks]


@pytest.mark.slow
def test_a_rank_that_waits_alone_gives_up() -> None:
    (port,) = free_ports(1)
    output, _ = start(0, port, {}, join_s=1).communicate(timeout=60)
    assert "joining" in output
    assert "waits_for_ranks=[1]" in output
    last = output.splitlines()[-1]
    assert last.startswith(
        f"Unavailable: the ranks of the replica do not meet at 127.0.0.1:{port} within 1 s: "
    )


@pytest.mark.slow
def test_a_taken_port_is_logged_once() -> None:
    """Rank 0 tries on, because a predecessor may have the port for a moment."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        output, _ = start(0, port, {}, join_s=1).communicate(timeout=60)
    assert output.count("master_not_free") == 1
    assert "do not meet" in output.splitlines()[-1]


def test_ranks_with_other_facts_are_all_refused() -> None:
    """One line names the ranks, the fact and both values; without it they would wait in a collective."""
    (port,) = free_ports(1)
    facts = {"-O": "1", "--enable-warm-up": "True"}
    refusal = (
        "ConfigurationRefused: rank 0 of the replica has --enable-warm-up True and rank 1 has False;"
        " start all ranks with the same flags, packages and kind of device"
    )
    ranks = start(0, port, facts), start(1, port, {**facts, "--enable-warm-up": "False"})
    assert printed(*ranks) == [refusal, refusal]
    assert [rank.returncode for rank in ranks] == [0, 0]


@pytest.mark.slow
def test_ranks_with_equal_facts_join() -> None:
    (port,) = free_ports(1)
    assert (
        printed(start(0, port, {"a": "1", "b": "2"}), start(1, port, {"b": "2", "a": "1"})) == ["joined"] * 2
    )
