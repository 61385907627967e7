"""What every command does with a variable that is refused."""

import importlib
import os

import pytest

from worker_svc.vllm_platform import PLATFORM_VARIABLE

# Ends a service that starts nevertheless.
NOWHERE = "--host=256.0.0.1"


@pytest.mark.parametrize(
    ("command", "module", "flags"),
    [
        ("gateway", "gateway.__main__", [NOWHERE]),
        ("scheduler", "scheduler_svc.__main__", [NOWHERE]),
        ("worker", "worker_svc.__main__", ["--model=x", NOWHERE]),
        ("compile", "deploy.commands.compile", []),
        ("up", "deploy.commands.up", [NOWHERE]),
    ],
)
def test_a_refused_variable_stops_the_start(
    command: str,
    module: str,
    flags: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With exit code 2 and one line that says what to change."""
    # Earlier tests may have run a worker in this process. It has set variables, with which another one does
    # not look at the rest, and it has left threads of torch, with which another one ends the process.
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv(PLATFORM_VARIABLE, raising=False)
    monkeypatch.setenv("VLLM_RBLN_USE_VLLM_MODEL", "0")
    monkeypatch.setattr("structlog.configure", lambda **_: None)
    monkeypatch.setattr("worker_svc.__main__._uses_torch", lambda: False)
    assert importlib.import_module(module).main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"triptych {command}: VLLM_RBLN_USE_VLLM_MODEL=0 is not supported: 1 is the only path"
    )
