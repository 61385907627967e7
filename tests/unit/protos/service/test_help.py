"""The examples of `--help`."""

import pytest

from deploy.commands.compile import CompileSettings
from deploy.commands.up import ServeSettings
from deploy.launcher.settings import KeepWorkerSettings, LaunchSettings
from gateway.settings import Settings as GatewaySettings
from protos.service.settings import ServiceSettings, load
from scheduler_svc.settings import Settings as SchedulerSettings
from worker_svc.settings import Settings as WorkerSettings

COMMANDS = [
    GatewaySettings, SchedulerSettings, WorkerSettings, KeepWorkerSettings, LaunchSettings, ServeSettings,
    CompileSettings,
]  # fmt: skip


@pytest.mark.parametrize("cls", COMMANDS, ids=lambda cls: cls.__name__ + cls.__module__)
def test_each_heading_has_an_example_that_works(
    cls: type[ServiceSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    """No default is shown that says nothing, and every flag has a description."""
    with pytest.raises(SystemExit):
        load(cls, ["--help"])
    text = capsys.readouterr().out
    headings = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    examples = [line.partition(":")[2] for line in text.splitlines() if line.startswith("  For example:")]
    assert len(examples) == len(headings) - 1  # "options:" has none
    load(cls, " ".join(examples).split())
    for nothing in ("null", "None", "()", "{}"):
        assert f"(default: {nothing})" not in text
    assert [name for name, field in cls.model_fields.items() if not field.description] == []
