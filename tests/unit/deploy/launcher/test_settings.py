"""`triptych up` offers every setting of every service."""

import subprocess
import sys

import pytest

from deploy.launcher.settings import LaunchSettings
from gateway.settings import Settings as GatewaySettings
from protos.service.settings import ServiceSettings, declared, group_of, load
from scheduler_svc.settings import Settings as SchedulerSettings
from worker_svc.settings import Settings as WorkerSettings

# Fields that `up` takes with another meaning or default than a service, with the reason.
REDEFINED = {
    (
        SchedulerSettings,
        "host",
    ): "only the gateway listens where --host says; the scheduler stays on loopback",
    (SchedulerSettings, "port"): "--scheduler-port; --port is the gateway's",
    (WorkerSettings, "host"): "workers stay on loopback",
    (WorkerSettings, "port"): "the launcher takes any free port",
    (WorkerSettings, "model"): "has a default here, so that `triptych up` alone serves something",
}
SETTINGS = [
    pytest.param(service, name, id=f"{service.__module__.partition('.')[0]}-{name}")
    for service in (GatewaySettings, SchedulerSettings, WorkerSettings)
    for name in service.model_fields
    if name not in LaunchSettings.fixed and (service, name) not in REDEFINED
]


@pytest.mark.parametrize(("service", "name"), SETTINGS)
def test_a_setting_of_a_service_is_a_setting_of_up(service: type[ServiceSettings], name: str) -> None:
    theirs, ours = service.model_fields[name], LaunchSettings.model_fields[name]
    for attribute in ("annotation", "metadata", "description", "default", "default_factory"):
        assert getattr(ours, attribute) == getattr(theirs, attribute), attribute
    assert group_of(LaunchSettings, name) == group_of(service, name)
    for table in ("reference_names", "reference_opposites"):
        assert declared(LaunchSettings, table).get(name) == declared(service, table).get(name)


def test_help_lists_every_setting_but_the_fixed_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(LaunchSettings, ["--help-all"])
    words = capsys.readouterr().out.replace(",", " ").split()
    for name in LaunchSettings.model_fields:
        assert (f"--{name.replace('_', '-')}" in words) == (name not in LaunchSettings.fixed), name


def test_reading_the_settings_loads_no_heavy_package() -> None:
    """`triptych up` answers --help and refuses a bad flag without torch, vLLM, FastAPI or numpy."""
    code = (
        "import sys, deploy.commands.up\n"
        "assert deploy.commands.up.main(['--modle', 'x']) == 2\n"
        "print(sorted({'torch', 'vllm', 'transformers', 'fastapi', 'numpy', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
