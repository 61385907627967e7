"""The pins that `triptych install` passes to pip; nothing is installed."""

import subprocess
import sys
from pathlib import Path

import pytest

from deploy import cli
from tests.support.lockfile import LOCKS


@pytest.fixture
def pip_calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replaces pip, and collects its command lines. The first call succeeds, later calls fail."""
    calls: list[list[str]] = []

    def run(command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        # pip reads the file while it runs: its lines take the file's place here.
        calls.append([*command[:-1], *Path(command[-1]).read_text().splitlines()])
        return subprocess.CompletedProcess(command, returncode=len(calls) - 1)

    monkeypatch.setattr("deploy.commands.install.subprocess.run", run)
    return calls


def pins(*locks: str) -> set[str]:
    lines = (line for lock in locks for line in (LOCKS / f"{lock}.txt").read_text().splitlines())
    return {line for line in lines if not line.startswith("#")}


@pytest.mark.parametrize(
    ("services", "locks"),
    [
        (["scheduler"], ("scheduler",)),
        (["scheduler", "otel"], ("scheduler", "otel")),
        ([], ("gateway", "scheduler", "worker-cpu")),
    ],
)
def test_locks_are_installed_at_once_and_without_dependencies(
    services: list[str], locks: tuple[str, ...], pip_calls: list[list[str]]
) -> None:
    """Pip runs in this environment and resolves nothing; a package of several locks is named once."""
    assert cli.main(["install", *services]) == 0
    (command,) = pip_calls
    assert command[:4] == [sys.executable, "-P", "-m", "pip"]
    assert command[4:8] == ["install", "--no-deps", "--require-hashes", "-r"]
    assert sorted(command[8:]) == sorted(pins(*locks))


def test_an_installed_torch_can_be_kept(pip_calls: list[list[str]]) -> None:
    """On a GPU the CPU build must not replace the installed one."""
    assert cli.main(["install", "worker", "--keep-torch"]) == 0
    assert {pin for pin in pins("worker-cpu") if pin not in pip_calls[0]} == {
        pin for pin in pins("worker-cpu") if pin.startswith("torch==")
    }


def test_a_failing_pip_adds_one_line(pip_calls: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    """For a worker the line says where torch's CPU build may be; the exit code is 1."""
    pip_calls.append([])  # the next call fails
    assert cli.main(["install", "worker"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "PIP_EXTRA_INDEX_URL" in error


def test_an_unknown_service_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["install", "torch"])
    assert stopped.value.code == 2
    assert "choose from gateway, scheduler, worker" in capsys.readouterr().err
