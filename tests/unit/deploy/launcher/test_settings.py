"""What the launcher passes on to which service, and how it refuses bad settings."""

import socket
from pathlib import Path

import pytest

from deploy.commands import up
from deploy.launcher import settings as flags
from deploy.launcher.run_dir import claim
from deploy.launcher.settings import LaunchSettings
from deploy.launcher.supervisor import LaunchError
from protos.settings import load


def pairs(command: list[str]) -> dict[str, str]:
    """Flags with values, as a dict; a switch maps to the flag that follows it or to nothing."""
    return {a: b for a, b in zip(command, [*command[1:], ""], strict=True) if a.startswith("--")}


def test_each_service_gets_its_own_settings() -> None:
    """The model goes to the worker, the geometry to the scheduler, the HTTP address to the gateway, and nothing elsewhere."""
    settings = load(
        LaunchSettings,
        [
            "--model",
            "m",
            "--served-model-name",
            "pet",
            "--dtype",
            "float32",
            "--device",
            "cpu",
            "--max-model-len",
            "512",
            "--max-num-seqs",
            "4",
            "--max-num-batched-tokens",
            "64",
            "--block-size",
            "128",
            "--port",
            "8123",
            "--host",
            "0.0.0.0",
            "--seed",
            "7",
            "--load-format",
            "dummy",
            "--trust-remote-code",
            "--num-blocks",
            "99",
            "--kv-memory",
            "1.5",
            "--no-enable-prefix-caching",
            "--tool-call-parser",
            "hermes",
            "--reasoning-parser",
            "qwen3",
        ],
    )
    common = {"--log-level": "info", "--log-format": "json"}
    assert pairs(flags.gateway_flags(settings, 8123, 9)) == common | {
        "--host": "0.0.0.0",
        "--port": "8123",
        "--scheduler-address": "127.0.0.1:9",
        "--drain-timeout-s": "5.0",
        "--tool-call-parser": "hermes",
        "--reasoning-parser": "qwen3",
    }
    assert pairs(flags.scheduler_flags(settings, 9)) == common | {
        "--host": "127.0.0.1",
        "--port": "9",
        "--drain-s": "2.0",
        "--served-model-name": "pet",
        "--max-model-len": "512",
        "--max-num-seqs": "4",
        "--max-num-batched-tokens": "64",
        "--block-size": "128",
        "--num-blocks": "99",
        "--no-enable-prefix-caching": "--log-level",
    }
    assert pairs(flags.worker_flags(settings, 8, 9)) == common | {
        "--model": "m",
        "--device": "cpu",
        "--host": "127.0.0.1",
        "--port": "8",
        "--scheduler-address": "127.0.0.1:9",
        "--dtype": "float32",
        "--load-format": "dummy",
        "--trust-remote-code": "--kv-memory",
        "--kv-memory": "1.5",
        "--seed": "7",
    }


def test_what_is_not_set_is_not_passed() -> None:
    """The services' own defaults hold where the launcher was told nothing."""
    settings = load(LaunchSettings, [])
    always = {"--host", "--port", "--drain-s", "--log-level", "--log-format"}
    assert set(pairs(flags.scheduler_flags(settings, 9))) == always


def test_pool_shapes_go_to_the_scheduler() -> None:
    """As they were written; the scheduler is the one who checks them."""
    settings = load(LaunchSettings, ["--pool-batch-sizes", "1,4", "--pool-prompt-lens", "4096,1024"])
    passed = pairs(flags.scheduler_flags(settings, 9))
    assert (passed["--pool-batch-sizes"], passed["--pool-prompt-lens"]) == ("1,4", "4096,1024")


def test_what_to_try_first_depends_on_the_model() -> None:
    """A model for embeddings is not asked to chat."""
    assert up.first_request({"id": "m", "embedding_size": 384})[0] == "/v1/embeddings"
    path, body = up.first_request({"id": "m"})
    assert (path, body["model"]) == ("/v1/chat/completions", "m")


def test_variables_set_what_flags_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRIPTYCH_MODEL is --model; a flag wins over it."""
    monkeypatch.setenv("TRIPTYCH_MODEL", "from-environment")
    assert load(LaunchSettings, []).model == "from-environment"
    assert load(LaunchSettings, ["--model", "from-flag"]).model == "from-flag"


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several workers split the cores; a single one is left to take them all."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert pairs(flags.worker_flags(load(LaunchSettings, ["--workers", "3"]), 8, 9))["--cpu-threads"] == "2"
    assert "--cpu-threads" not in flags.worker_flags(load(LaunchSettings, []), 8, 9)


def test_each_worker_gets_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several workers take one visible device each, round and round."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.delenv("RBLN_DEVICES", raising=False)
    cuda = load(LaunchSettings, ["--device", "cuda", "--workers", "3"])
    assert [flags.worker_environment(cuda, i) for i in range(3)] == [
        {"CUDA_VISIBLE_DEVICES": name} for name in ("4", "5", "4")
    ]
    rbln = load(LaunchSettings, ["--device", "rbln", "--workers", "2"])
    assert flags.worker_environment(rbln, 1) == {"RBLN_DEVICES": "1"}
    assert flags.worker_environment(load(LaunchSettings, ["--device", "cuda"]), 0) == {}


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--port", "99999"], "--port"),
        (["--workers", "0"], "--workers"),
        (["--device", "tpu"], "--device"),
        (["--max-model-len", "many"], "--max-model-len"),
        (["--modle", "x"], "--modle"),
    ],
)
def test_a_bad_setting_is_one_clear_line(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flag is named, nothing is started, and the exit code is 2."""
    assert up.main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert word in lines[0]


def test_a_port_in_use_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A taken HTTP port is said before any service is started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert (
            up.main(["--model", str(tmp_path), "--port", str(port), "--run-dir", str(tmp_path / "run")]) == 2
        )
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"port {port}" in error
    assert "--port" in error
    assert list((tmp_path / "run").iterdir()) == []


def test_two_launchers_never_share_a_run_dir(tmp_path: Path) -> None:
    """The second one is told who has it; once the first is gone, the run dir is free and swept."""
    with claim(tmp_path):
        (tmp_path / "worker-0.pid").write_text("1\n")
        with pytest.raises(LaunchError, match=r"in use by another .*pid \d+"), claim(tmp_path):
            pass
    with claim(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == ["launcher.pid"]


def test_ports_are_all_different() -> None:
    """The gateway, the scheduler and every worker get a free port each."""
    with up.free_ports(load(LaunchSettings, ["--port", "0", "--workers", "4"])) as ports:
        assert len(set(ports)) == 6
