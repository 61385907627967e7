"""`triptych doctor COMMAND`: what it understood, what it checks without torch, and its exit code."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from deploy.checks.check_results import setting_sources
from deploy.commands import doctor
from deploy.launcher.settings import LaunchSettings
from deploy.vllm_flags.translate import VllmFlags
from protos.service.grpc_options import unix_address
from protos.service.settings import given_flags, load
from tests.support import tiny_models
from tests.support.paths import ROOT
from tests.support.ports import free_port
from tests.support.security.certificates import OTHER_TOKEN, TOKEN, service_files

# Without these, a gateway and a scheduler run, and a worker does not.
_WORKERS_OWN = ("torch", "vllm", "transformers", "triton")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a clean shell, and logs as they are."""
    monkeypatch.setattr("structlog.configure", lambda **_: None)
    for name in list(os.environ):
        if name.startswith(("VLLM_", "RBLN_", "TORCH_RBLN_", "TRIPTYCH_")):
            monkeypatch.delenv(name)


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = doctor.main([*arguments, "--json"])
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert content["starts"] == (code == 0)
    return code, content


def checks(content: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {check["name"]: (check["status"], check["text"]) for check in content["checks"]}


def test_a_gateway_is_checked_without_torch(capsys: pytest.CaptureFixture[str]) -> None:
    """It needs its packages and its port; the scheduler may come later."""
    code, content = report(capsys, "gateway", "--port=0", f"--scheduler-address=127.0.0.1:{free_port()}")
    assert code == 0
    found = checks(content)
    assert found["gateway"][0] == "ok"
    assert found["scheduler"][0] == "note"
    assert found.keys() == {"environment", "gateway", "scheduler"}


@pytest.mark.parametrize(("days", "status"), [(90, "ok"), (20, "note"), (-1, "FAILED")])
def test_certificates_near_their_end_are_noted_and_ended_ones_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, days: float, status: str
) -> None:
    """The gateway itself would not start with the latter, and says the same."""
    paths = service_files(tmp_path, days=days)
    flags = [f"--ssl-certfile={paths.cert}", f"--ssl-keyfile={paths.key}", f"--grpc-tls-ca={paths.ca}"]
    flags += ["--port=0", f"--scheduler-address=127.0.0.1:{free_port()}"]
    with capture_logs():
        code, content = report(capsys, "gateway", *flags)
    found = checks(content)
    assert found["certificates"][0] == status
    assert code == (2 if days < 0 else 0)
    if days < 90:
        assert f"--ssl-certfile: the certificate in {paths.cert} end" in found["certificates"][1]
    if days < 0:
        assert found["gateway"] == ("FAILED", found["certificates"][1])


def test_a_port_in_use_stops_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    """The reason names the port, as the service's own line would."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, content = report(capsys, "scheduler", f"--port={port}")
    assert code == 2
    assert checks(content)["scheduler"] == ("FAILED", content["error"])
    assert str(port) in content["error"]


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a scheduler with a service token."""
    address = unix_address(path := tmp_path_factory.mktemp("scheduler") / "s.sock")
    command = [sys.executable, "-m", "scheduler_svc", "--port=0", f"--socket={path}", "--log-level=error"]
    with subprocess.Popen(command, env={**os.environ, "TRIPTYCH_SERVICE_TOKEN": TOKEN}) as process:
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(timeout=60)
        yield address
        process.terminate()


@pytest.mark.parametrize(
    ("token", "code", "status"), [(TOKEN, 0, "ok"), (OTHER_TOKEN, 1, "FAILED"), (None, 1, "FAILED")]
)
def test_a_scheduler_is_asked(
    scheduler: str, token: str | None, code: int, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A gateway with another token than the scheduler's would start, and never serve."""
    flags = ["--port=0", f"--scheduler-address={scheduler}", *([f"--service-token={token}"] if token else [])]
    found, content = report(capsys, "gateway", *flags)
    assert (found, checks(content)["scheduler"][0]) == (code, status)


@pytest.mark.parametrize(
    ("flags", "variables", "source"),
    [
        (["-O", '{"level": 2}'], {}, "command line"),
        (["-O2"], {}, "command line"),
        (["--compilation-config.level", "2"], {}, "command line"),
        ([], {"TRIPTYCH_OPTIMIZATION_LEVEL": '{"level": 2}'}, "TRIPTYCH_OPTIMIZATION_LEVEL"),
        (["--config", "FILE"], {}, "configuration file"),
    ],
    ids=["-O JSON", "-O2", "key", "variable", "file"],
)
def test_each_setting_has_its_source(
    flags: list[str], variables: dict[str, str], source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A level that is vLLM's configuration is a setting of another name."""
    file = tmp_path / "settings.yaml"
    file.write_text("optimization_level: {level: 2}\nmodel: here\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    argv = [str(file) if flag == "FILE" else flag for flag in flags]
    argv += [] if "FILE" in flags else ["here"]
    settings = load(LaunchSettings, argv, VllmFlags())
    found = {
        each.flag: each for each in setting_sources(settings, given_flags(LaunchSettings, argv, VllmFlags()))
    }
    level = found.get("--compilation-config") or found["--optimization-level"]
    assert level.source == source
    assert found["--model"].source == ("configuration file" if "FILE" in flags else "command line")


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
    address = f"127.0.0.1:{free_port()}"
    arguments = (
        "gateway", "--port=0", f"--scheduler-address={address}", "--max-prompts=9", "--admin-api-key=sk-of-a-flag",
    )  # fmt: skip
    _, content = report(capsys, *arguments)
    assert {each["name"]: each["kind"] for each in content["environment"]} == {
        "VLLM_API_KEY": "mapped",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "mapped",
        "VLLM_PLUGINS": "ignored",
        "TRIPTYCH_KEEP_ALIVE": "unknown",
    }
    assert {each["flag"]: (each["value"], each["source"]) for each in content["settings"]} == {
        "--port": ("0", "command line"),
        "--scheduler-address": (address, "command line"),
        "--max-prompts": ("9", "command line"),
        "--admin-api-key": ("********", "command line"),
        "--keep-alive-s": ("7", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"),
        "--api-key": ("********", "VLLM_API_KEY"),
    }
    status, text = checks(content)["environment"]
    assert status == "note"
    assert text.startswith(
        "TRIPTYCH_KEEP_ALIVE is unknown and has no effect here; did you mean TRIPTYCH_KEEP_ALIVE_S?"
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
    assert code == 2
    assert content["environment"][0]["kind"] == "rejected"
    assert checks(content)["environment"][0] == "FAILED"


def test_an_unknown_command_is_a_bad_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["srve", "smollm2"]) == 2
    assert capsys.readouterr().err == (
        "triptych doctor: srve is not a command that can be checked; use serve\n"
    )


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with all packages of this environment but a worker's."""
    folder = tmp_path_factory.mktemp("packages")
    for path in map(Path, {path for path in sys.path if path.endswith("site-packages")}):
        for package in path.iterdir():
            if not package.name.startswith(_WORKERS_OWN):
                (folder / package.name).symlink_to(package)
    return folder


@pytest.mark.parametrize("command", ["serve", pytest.param("worker", marks=pytest.mark.slow)])
def test_it_works_where_torch_is_not_installed(command: str, without_torch: Path, tmp_path: Path) -> None:
    """The worker would refuse to start for want of torch; the other services are checked."""
    model = tiny_models.write("llama", tmp_path / "model")
    code = "import sys; from deploy.cli import main; sys.exit(main())"
    own = {"serve": ["--enforce-eager", f"--run-dir={tmp_path / 'run'}"], "worker": ["--scheduler-address="]}
    arguments = [f"--model={model}", "--port=0", *own[command]]
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, "doctor", command, *arguments, "--json"],
        check=False, capture_output=True, text=True, cwd=tmp_path, timeout=100,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": f"{ROOT}{os.pathsep}{without_torch}"},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    content = json.loads(done.stdout)
    found = checks(content)
    assert {name for name, (status, _) in found.items() if status == "FAILED"} == {"worker"}
    assert content["error"] == "torch is not installed; run `triptych install worker`"
    assert found["model"][0] == "ok"
    assert bool(content["flags"]) == (command == "serve")
