"""`triptych doctor`: whether a command would start, and the meaning of its flags and variables.

`triptych doctor serve MODEL …` takes the flags of `triptych serve`, and likewise for each service. Without a
command it takes a worker's flags and checks the device; --parity also runs a model there.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from deploy.checks import starts
from deploy.checks.check_results import Note, Report, setting_sources
from deploy.commands.up import ServeSettings
from deploy.launcher.settings import KeepWorkerSettings, LaunchSettings, check_variables
from deploy.vllm_flags.translate import VllmFlags
from gateway.settings import Settings as GatewaySettings
from protos.errors import ConfigurationRefused
from protos.service import environment
from protos.service.help import similar
from protos.service.logs import configure, reserve_stdout
from protos.service.settings import CONFIG_VARIABLE, Group, ServiceSettings, given_flags, load
from scheduler_svc.settings import Settings as SchedulerSettings
from worker_svc.settings import Settings as WorkerSettings
from worker_svc.vllm_platform import prepare_libraries

_JSON: Final = "--json"


class DoctorSettings(WorkerSettings):
    """Checks whether a worker would start here, or another command: triptych doctor serve MODEL, for example.

    --json prints one object instead of lines. The exit code is 0 if the command would start and work, 2 if it
    would refuse to start, and 1 for any other failed check, or if the model must be fetched before all can be
    checked.
    """

    model_config = SettingsConfigDict(cli_prog_name="triptych doctor")

    # It joins no other rank.
    needs_master: ClassVar[bool] = False

    groups: ClassVar[Mapping[Group, tuple[str, ...]]] = {Group.MODEL: ("parity", "model")}

    parity: bool = False
    """Run a model on the device and compare its tokens and log-probabilities with transformers on this host's
    CPU, which needs the model's memory in float32."""
    model: str = Field("", validate_default=False)
    """The model to run with --parity: a packaged model's name, a Hugging Face id, a folder or a .gguf file.
    Default: a small model with made-up weights."""

    @model_validator(mode="after")
    def _can_compare(self) -> "DoctorSettings":
        if self.model and not self.parity:
            raise ValueError(
                "only --parity runs a model; add it, omit --model, or name a command: triptych doctor worker"
            )
        if self.parity and (self.compile_only or self.load_format == "dummy" or self.layout.world_size > 1):
            raise ValueError(
                "--parity runs real weights on one rank; omit --compile-only, --load-format dummy and the sizes"
            )
        return self


_COMMANDS: Final[Mapping[str, type[ServiceSettings]]] = {
    "serve": ServeSettings,
    "up": LaunchSettings,
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
    "keep-worker": KeepWorkerSettings,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the settings and the result of each check; returns the exit code of `DoctorSettings`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = _JSON in arguments
    arguments = [argument for argument in arguments if argument != _JSON]
    command = arguments.pop(0) if arguments and not arguments[0].startswith("-") else ""
    report = Report(f"triptych {command or 'worker'}", as_json=as_json)
    report.describe("environment", environment.read(os.environ))
    foreign = VllmFlags() if command in {"serve", "up"} else None
    try:
        cls = _settings_class(command)
        settings = load(cls, arguments, foreign)
    except ConfigurationRefused as error:
        print(f"triptych doctor: {error}", file=sys.stderr)
        return report.refuse(str(error))
    report.describe("flags", foreign.notes if foreign else [])
    given = given_flags(cls, arguments, foreign and VllmFlags())
    report.describe("settings", setting_sources(settings, given))
    configure("doctor", level="warning", log_format="console")
    report.check("environment", _variables)
    prepare_libraries()
    reserve_stdout()
    os.environ.pop(CONFIG_VARIABLE, None)  # services get all settings as flags
    _check(settings, report)
    return report.close(f"`triptych {command or 'worker'}` would start.")


def _settings_class(command: str) -> type[ServiceSettings]:
    if not command:
        return DoctorSettings
    if command not in _COMMANDS:
        meant = similar(command, _COMMANDS) or ", ".join(_COMMANDS)
        raise ConfigurationRefused(f"{command} is not a command that can be checked; use {meant}")
    return _COMMANDS[command]


def _variables() -> str:
    lines: list[str] = []
    check_variables(os.environ, lines.append)
    if lines:
        raise Note("; ".join(lines))
    return "all variables have an effect"


def _check(settings: ServiceSettings, report: Report) -> None:
    has_parity = isinstance(settings, DoctorSettings) and settings.parity
    device = starts.check(settings.model_copy(update={"model": ""}) if has_parity else settings, report)
    if device is not None and isinstance(settings, WorkerSettings):
        # Both import torch.
        from deploy.checks import device as device_checks
        from deploy.checks import parity

        computed = device_checks.check(device, report, runs=not settings.compile_only)
        if has_parity:
            parity.check(settings, report, computed)
