"""The command `triptych`."""

import importlib.util
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from deploy import cli


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for command in (
        "up", "serve", "gateway", "scheduler", "worker", "keep-worker", "doctor", "plan", "compile", "catalog", "models", "install",
        "compose-files", "chat", "complete", "bench", "run-batch", "env", "version",
    ):  # fmt: skip
        assert f"\n    {command}" in text


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """With 2 and one line that lists the commands."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(["launch"])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "'up'" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("srve m", "'srve'; did you mean serve?"),
        ("secure-fils", "'secure-fils'; did you mean secure-files?"),
        ("catalog lst", "'lst'; did you mean list?"),
        ("catalog list --jsn", "--jsn; did you mean --json?"),
        ("models fetch smolm2", "'smolm2'; did you mean smollm2?"),
        ("quantize m --scheme w4a61", "'w4a61'; did you mean w4a16?"),
    ],
)
def test_a_misspelled_word_gets_the_near_one(
    command: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(command.split())
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(meant)


@pytest.mark.parametrize(
    "command",
    [
        ["plan"], ["catalog", "list"], ["models", "fetch", "smollm2"], ["install"], ["compose-files", "folder"],
        ["chat"], ["complete"], ["env"],
    ],
    ids=lambda command: command[0],
)  # fmt: skip
def test_a_bad_flag_is_one_line(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The line names the command and the flag; the exit code is 2."""
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command, "--bogus"])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"triptych {command[0]}")
    assert "unrecognized arguments: --bogus; " in error
    assert error.count("\n") == 1


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`triptych version` prints the distribution's version."""
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"triptych {version('triptych')}\n"


@pytest.mark.parametrize("command", ["gateway", "scheduler", "plan"])
def test_help_of_services_loads_no_torch(command: str) -> None:
    code = (
        "import sys; from deploy import cli\n"
        f"try: cli.main([{command!r}, '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(bool({'torch', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: triptych" in done.stdout


def test_a_worker_without_torch_names_the_command_that_installs_it() -> None:
    """Where torch is not installed, the worker says in one line how to install it."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['vllm'] = None\n"
        "from deploy import cli\n"
        "sys.exit(cli.main(['worker', '--model', 'smollm2', '--device', 'cpu']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "run `triptych install worker`" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "missing", "line"),
    [
        ("chat", "openai", "openai is not installed; run `triptych install client`"),
        ("complete", "openai", "openai is not installed; run `triptych install client`"),
        ("run-batch", "openai", "openai is not installed; run `triptych install client`"),
        ("bench", "vllm", "vllm is not installed; run `triptych install worker`"),
    ],
)
def test_a_client_without_its_package_names_the_command_that_installs_it(
    command: str, missing: str, line: str
) -> None:
    """In one line, with the exit code 2."""
    code = f"import sys; sys.modules['{missing}'] = None\nfrom deploy import cli\nsys.exit(cli.main(['{command}']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, f"triptych {command}: {line}\n")


def test_fetching_without_torch_names_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Converting a demo model needs torch; the command says how to install it instead of how it failed."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "worker_svc.model_files.loader.find_spec", lambda name: None if name == "torch" else real(name)
    )
    assert cli.main(["models", "fetch", "smollm2", "--cache-dir", str(tmp_path)]) == 1
    assert "run `triptych install worker`" in capsys.readouterr().err
