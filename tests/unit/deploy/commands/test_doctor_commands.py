"""`triptych doctor COMMAND`: what it understood, what it checks without torch, and its exit code."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.commands import doctor
from tests.support import tiny_models
from tests.support.paths import ROOT
from tests.support.ports import free_port

# Without these, a gateway and a scheduler run, and a worker does not.
_WORKERS_OWN = ("torch", "vllm", "transformers", "triton")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a clean shell, and logs as they are."""
    monkeypatch.setattr("structlog.configure", lambda **_: None)
    for name in list(os.environ):
        if name.startswith(("VLLM_", "RBLN_", "TRIPTYCH_")):
            monkeypatch.delenv(name)


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Returns the exit code and the JSON object."""
    code = doctor.main([*arguments, "--json"])
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert content["starts"] == (code == 0)
    return code, content


def checks(content: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Returns each check's status and text."""
    return {check["name"]: (check["status"], check["text"]) for check in content["checks"]}


def test_a_gateway_is_checked_without_torch(capsys: pytest.CaptureFixture[str]) -> None:
    """It needs its packages and its port; the scheduler may come later."""
    code, content = report(capsys, "gateway", "--port=0", f"--scheduler-address=127.0.0.1:{free_port()}")
    assert code == 0
    found = checks(content)
    assert found["services"] == ("ok", "those of the gateway are installed")
    assert found["parsers"] == ("ok", "auto for tool calls, auto for thinking")
    assert found["port"][0] == "ok"
    assert found["scheduler"][0] == "note"
    assert found["scheduler"][1].endswith("new requests wait for --park-timeout-s and then get 503")
    assert "torch" not in found


def test_a_port_in_use_stops_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    """The check names the port and the flag."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, content = report(capsys, "scheduler", f"--port={port}")
    assert code == 1
    status, text = checks(content)["port"]
    assert status == "FAILED"
    assert f"cannot listen on 127.0.0.1 port {port}" in text
    assert text.endswith("choose another --port or --host")


def test_what_was_understood_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables by what they do, and settings by where they come from; secrets as asterisks."""
    for name, value in {
        "VLLM_API_KEY": "sk-of-vllm",
        "TRIPTYCH_ADMIN_API_KEY": "sk-of-ours",
        "VLLM_PLUGINS": "rbln",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "7",
        "TRIPTYCH_KEEP_ALIVE": "7",
    }.items():
        monkeypatch.setenv(name, value)
    arguments = ("gateway", "--port=0", "--max-prompts=9", "--admin-api-key=sk-of-a-flag")
    _, content = report(capsys, *arguments)
    assert {each["name"]: each["kind"] for each in content["environment"]} == {
        "VLLM_API_KEY": "mapped",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "mapped",
        "VLLM_PLUGINS": "ignored",
    }
    assert {each["flag"]: (each["value"], each["source"]) for each in content["settings"]} == {
        "--port": ("0", "command line"),
        "--max-prompts": ("9", "command line"),
        "--admin-api-key": ("********", "command line"),
        "--keep-alive-s": ("7", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"),
        "--api-key": ("********", "VLLM_API_KEY"),
    }
    found = checks(content)
    assert found["environment"][0] == "note"
    assert found["own variables"] == (
        "note",
        "TRIPTYCH_KEEP_ALIVE is not a setting and has no effect; did you mean TRIPTYCH_KEEP_ALIVE_S?",
    )
    doctor.main(list(arguments))
    printed = capsys.readouterr().out
    assert "VLLM_PLUGINS=rbln has no effect here" in printed
    assert "sk-of" not in printed + json.dumps(content)


def test_a_refused_variable_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service would refuse to start, so the doctor says no."""
    monkeypatch.setenv("VLLM_RBLN_USE_VLLM_MODEL", "0")
    code, content = report(capsys, "scheduler", "--port=0")
    assert code == 1
    assert content["environment"][0]["kind"] == "rejected"
    assert checks(content)["environment"][0] == "FAILED"


def test_a_bad_flag_is_a_bad_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, one line, and the same text in the object."""
    assert doctor.main(["scheduler", "--max-num-seq=4", "--json"]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith(
        "triptych doctor: unrecognized arguments: --max-num-seq; did you mean --max-num-seqs"
    )
    content = json.loads(printed.out)
    assert (content["starts"], content["error"]) == (False, line.removeprefix("triptych doctor: "))


def test_an_unknown_command_is_a_bad_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """The line names the one that was meant."""
    assert doctor.main(["srve", "smollm2"]) == 2
    assert capsys.readouterr().err == (
        "triptych doctor: srve is not a command that can be checked; use serve\n"
    )


def test_links_of_kubernetes_are_no_settings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that is called triptych gives every pod such variables."""
    monkeypatch.setenv("TRIPTYCH_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("TRIPTYCH_PORT_8000_TCP_ADDR", "10.0.0.1")
    _, content = report(capsys, "scheduler", "--port=0")
    assert checks(content)["own variables"] == ("ok", "none set")


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with all packages of this environment but a worker's."""
    folder = tmp_path_factory.mktemp("packages")
    for path in map(Path, {path for path in sys.path if path.endswith("site-packages")}):
        for package in path.iterdir():
            if not package.name.startswith(_WORKERS_OWN):
                (folder / package.name).symlink_to(package)
    return folder


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_it_works_where_torch_is_not_installed(command: str, without_torch: Path, tmp_path: Path) -> None:
    """It names torch as missing and the checks that it left out; all others run."""
    model = tiny_models.write("llama", tmp_path / "model")
    code = "import sys; from deploy.cli import main; sys.exit(main())"
    flags = ["--enforce-eager", "--run-dir", str(tmp_path / "run")] if command == "serve" else ["--port=0"]
    arguments = [
        f"--model={model}",
        *flags,
        *(["--port=0", "--scheduler-port=0"] if command == "serve" else []),
    ]
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, "doctor", command, *arguments, "--json"],
        check=False, capture_output=True, text=True, cwd=tmp_path, timeout=100,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": f"{ROOT}{os.pathsep}{without_torch}"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    content = json.loads(done.stdout)
    found = checks(content)
    assert found["torch"] == ("FAILED", "torch not installed; run `triptych install worker`")
    assert {name for name, (status, _) in found.items() if status == "FAILED"} == {"torch"}
    assert found["device"][0] == found["attention"][0] == "skipped"
    assert found["config"] == ("ok", "LlamaForCausalLM")
    assert found["weight files"][0] == "ok"
    assert bool(content["flags"]) == (command == "serve")
