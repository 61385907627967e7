"""The names in Dockerfiles and compose files exist: files, modules, flags and variables."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import cli
from deploy.launcher.settings import KeepWorkerSettings
from deploy.secure_files import make
from gateway.settings import Settings as GatewaySettings
from protos.errors import ConfigurationRefused
from protos.service.settings import ServiceSettings, load
from scheduler_svc.settings import Settings as SchedulerSettings
from tests.support.paths import ROOT
from worker_svc.settings import Settings as WorkerSettings

DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("images/*.Dockerfile"))
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "worker": KeepWorkerSettings,
}


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_a_dockerfile_names_files_and_commands_that_exist(dockerfile: Path) -> None:
    """The locks that a build needs, and the commands of the build, the health check and the container."""
    text = dockerfile.read_text()
    assert f"-f {dockerfile.relative_to(ROOT)} " in text
    locks = set(re.findall(r"deploy/locks/[\w.-]+\.txt", text))
    assert locks
    assert [name for name in locks if not (ROOT / name).exists()] == []
    commands = set(re.findall(r'/bin/triptych(?:", "| )([\w-]+)', text))
    assert "healthcheck" in commands
    for name in commands:
        assert callable(cli._COMMANDS[name].load())


@pytest.mark.parametrize("name", SETTINGS)
def test_a_compose_service_is_built_and_started_with_names_that_exist(name: str) -> None:
    """Its Dockerfile exists, and each variable is a setting of the service."""
    service, settings = COMPOSE["services"][name], SETTINGS[name]
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).exists()
    variables = {key for key in service["environment"] if key.startswith("TRIPTYCH_")}
    assert variables <= {f"TRIPTYCH_{field.upper()}" for field in settings.model_fields}


@pytest.mark.parametrize("name", SETTINGS)
def test_commands_in_a_container_read_the_settings_of_its_service(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address that `.env` has for this machine, perhaps with a range of ports, is no container's."""
    monkeypatch.setenv("TRIPTYCH_HOST", "192.0.2.1")
    monkeypatch.setenv("TRIPTYCH_PORT", "8000-8003")
    service = COMPOSE["services"][name]
    for variable, value in service["environment"].items():
        monkeypatch.setenv(variable, re.sub(r"\$\{\w+:-(\w+)\}", r"\1", value or ""))
    settings = load(SETTINGS[name], []).model_dump()
    assert settings["host"] == "0.0.0.0"
    assert f":{settings['port']}" in f"{service['healthcheck']['test']} {service.get('ports')}"


@pytest.mark.parametrize("name", SETTINGS)
def test_one_file_has_the_settings_of_all_services(name: str) -> None:
    """Compose reads its own variables from the same file, which no image and no commit takes along."""
    assert COMPOSE["services"][name]["env_file"] == [{"path": ".env", "required": False}]
    for ignored in (".gitignore", ".dockerignore"):
        assert "deploy/.env" in (ROOT / ignored).read_text().splitlines()


def test_the_schedulers_statistics_outlive_it() -> None:
    """`triptych plan` finds them. The image has the folder, which gives the volume its owner."""
    scheduler = COMPOSE["services"]["scheduler"]
    folder = scheduler["environment"]["TRIPTYCH_STATE_DIR"]
    assert f"state:{folder}" in scheduler["volumes"]
    assert "state" in COMPOSE["volumes"]
    assert f"install -d -o 10001 -g 10001 {folder}" in (DEPLOY / "images/scheduler.Dockerfile").read_text()


def test_the_secure_compose_file_names_settings_and_the_files_that_are_made(tmp_path: Path) -> None:
    """Each service uses files of the volume that `triptych secure-files` fills before the service starts."""
    secure = yaml.safe_load((DEPLOY / "compose.secure.yaml").read_text())["services"]
    made = {f"/secure/{path.name}" for path in make(tmp_path).folder.iterdir()}
    assert secure.pop("secure-files")["command"][0] == "/secure"
    assert secure.keys() == SETTINGS.keys()
    for name, service in secure.items():
        fields = {f"TRIPTYCH_{field.upper()}" for field in SETTINGS[name].model_fields}
        assert service["environment"].keys() <= fields
        assert {path for path in service["environment"].values() if path.startswith("/")} <= made
        assert service["depends_on"]["secure-files"]["condition"] == "service_completed_successfully"
        needed = {"TRIPTYCH_GRPC_TLS_CA", "TRIPTYCH_SERVICE_TOKEN_FILE"}
        needed |= (
            {"TRIPTYCH_API_KEY_FILE"} if name == "gateway" else {"TRIPTYCH_GRPC_TLS_REQUIRE_CLIENT_CERT"}
        )
        assert needed <= service["environment"].keys()


def test_containers_may_drain_before_they_are_killed() -> None:
    """With the default --drain-s and time to close."""
    for name in ("gateway", "scheduler"):
        grace_s = int(COMPOSE["services"][name]["stop_grace_period"].removesuffix("s"))
        assert grace_s >= SETTINGS[name].model_fields["drain_s"].default + 5


def test_each_worker_has_a_compile_cache_of_its_own() -> None:
    """Workers run the code that they find, so the folder is an anonymous volume, one for each container."""
    worker = COMPOSE["services"]["worker"]
    root = worker["environment"]["TRIPTYCH_COMPILE_CACHE_ROOT"]
    assert root in worker["volumes"]
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert worker["environment"][variable].startswith(f"{root}/")
    assert (
        f"install -d -o 10001 -g 10001 /cache {root}\n" in (DEPLOY / "images/worker.Dockerfile").read_text()
    )


def test_the_compose_file_of_ranks_has_one_replica_of_two() -> None:
    """Its two workers agree on all but their ranks, and rank 0 listens where the other looks for it."""
    services = yaml.safe_load((DEPLOY / "compose.ranks.yaml").read_text())["services"]
    assert list(services) == ["worker", "worker-rank-1"]
    given = [dict(service["environment"]) for service in services.values()]
    assert [environment.pop("TRIPTYCH_RANK") for environment in given] == ["0", "1"]
    assert given[0] == given[1]
    assert given[0]["TRIPTYCH_MASTER"].startswith("worker:")


@pytest.mark.parametrize(
    ("shell", "sizes"),
    [
        ({}, (1, 2)),
        ({"TRIPTYCH_TENSOR_PARALLEL_SIZE": "2", "TRIPTYCH_PIPELINE_PARALLEL_SIZE": "1"}, (2, 1)),
        ({"TRIPTYCH_TENSOR_PARALLEL_SIZE": "2"}, None),
        ({"TRIPTYCH_PIPELINE_PARALLEL_SIZE": "4"}, None),
    ],
)
def test_the_compose_file_of_ranks_refuses_sizes_that_need_more_containers(
    shell: dict[str, str], sizes: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks would wait for the others for ever."""
    services = yaml.safe_load((DEPLOY / "compose.ranks.yaml").read_text())["services"]
    for name, value in services["worker-rank-1"]["environment"].items():
        own = re.sub(r"\$\{(\w+):-(\w+)\}", lambda match: shell.get(match[1], match[2]), value)
        monkeypatch.setenv(name, own)
    if sizes is None:
        with pytest.raises(ConfigurationRefused, match="--world-size 2 is not"):
            load(KeepWorkerSettings, ["--model", "any"])
    else:
        layout = load(KeepWorkerSettings, ["--model", "any"]).layout
        assert (layout.rank, layout.tensor, layout.pipeline) == (1, *sizes)


@pytest.mark.parametrize(
    "path", [DEPLOY / f"compose.{name}.yaml" for name in ("cuda", "rbln")], ids=lambda path: path.name
)
def test_the_compose_file_of_a_device_extends_the_worker(path: Path) -> None:
    ((name, service),) = yaml.safe_load(path.read_text())["services"].items()
    assert name == "worker"
    load(WorkerSettings, ["--model", "any", "--device", service["environment"]["TRIPTYCH_DEVICE"]])
