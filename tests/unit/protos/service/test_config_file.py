"""`--config FILE.yaml`: flags come before the environment, and the environment before the file."""

from pathlib import Path
from typing import Any

import pytest

from deploy.launcher.settings import LaunchSettings
from gateway.settings import Settings as GatewaySettings
from protos.errors import ConfigurationRefused
from protos.service.settings import CONFIG_VARIABLE, ServiceSettings, load
from scheduler_svc.settings import Settings as SchedulerSettings
from worker_svc.settings import Settings as WorkerSettings

_FILE = """
log-level: warning
gateway:
  port: 81
  api_key: [one, two]
scheduler:
  port: 82
  tenant_weights: {paid: 4, trial: 0.5}
  decode-buckets: [1, 2, 4]
  state_dir: /state
worker:
  model: some/model
  compilation_config: 3
launcher:
  workers: 2
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "triptych.yaml"
    path.write_text(_FILE)
    return path


def _given(settings: ServiceSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.model_fields_set}


def test_each_service_reads_its_section_of_one_file(file: Path) -> None:
    flags = ["--config", str(file)]
    gateway = load(GatewaySettings, flags)
    assert [key.get_secret_value() for key in gateway.api_key] == ["one", "two"]
    assert (gateway.port, gateway.log_level, len(gateway.model_fields_set)) == (81, "warning", 3)
    assert _given(load(SchedulerSettings, flags)) == {
        "log_level": "warning", "port": 82, "decode_buckets": (1, 2, 4), "state_dir": Path("/state"),
        "tenant_weights": {"paid": 4.0, "trial": 0.5},
    }  # fmt: skip
    worker = load(WorkerSettings, flags)
    assert (worker.model, worker.level_for(0)) == ("some/model", 3)


def test_a_launcher_reads_all_sections(file: Path) -> None:
    settings = load(LaunchSettings, ["--config", str(file)])
    assert (settings.port, settings.scheduler_port, settings.workers) == (81, 82, 2)
    assert settings.model == "some/model"


def test_flags_come_before_the_environment_and_that_before_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file may also be named by a variable."""
    monkeypatch.setenv(CONFIG_VARIABLE, str(file))
    assert load(GatewaySettings, []).port == 81
    monkeypatch.setenv("TRIPTYCH_PORT", "7")
    assert load(GatewaySettings, []).port == 7
    assert load(GatewaySettings, ["--port", "8"]).port == 8


@pytest.mark.parametrize(
    ("cls", "text", "refusal"),
    [
        (
            GatewaySettings,
            "gateway: {prot: 1}",
            "section gateway: there is no setting 'prot'; did you mean port?",
        ),
        (GatewaySettings, "gateway: {port: many}", "port should be a valid integer"),
        (GatewaySettings, "gateway: 3", "section gateway should have lines like `port: 8000`"),
        (GatewaySettings, "port: 81\na: [", "is not YAML at line 3, column 1"),
        (GatewaySettings, "port: 2026-13-45", "is not YAML"),
        (GatewaySettings, "gatway: {port: 1}", "there is no setting 'gatway'; did you mean gateway?"),
        (LaunchSettings, "log_format: console", "log_format cannot be set here: "),
        (LaunchSettings, "worker: {rank: 1}", "section worker: rank cannot be set here: "),
        (LaunchSettings, "worker: {port: 1}", "section worker: there is no setting 'port'; "),
        (LaunchSettings, "log_level: info\nworker: {log_level: debug}", "section worker sets log_level"),
    ],
)
def test_a_bad_file_is_one_clear_line(
    cls: type[ServiceSettings], text: str, refusal: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationRefused) as caught:
        load(cls, ["--config", str(path)])
    assert str(path) in str(caught.value)
    assert refusal in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_refusal_of_broken_yaml_repeats_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("api_key: sk-very-secret: x")
    with pytest.raises(ConfigurationRefused, match="is not YAML at line 1, column") as caught:
        load(GatewaySettings, ["--config", str(path)])
    assert "secret" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """The line says why it cannot be read."""
    with pytest.raises(ConfigurationRefused, match=r"--config .*none.yaml: No such file or directory"):
        load(GatewaySettings, ["--config", str(tmp_path / "none.yaml")])
