"""Processes that look for an NPU: the choice of --device auto, its memory, and the output of commands."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import tiny_models
from tests.support.paths import ROOT
from tests.support.rbln.vendor_packages import environment

pytestmark = [pytest.mark.npu, pytest.mark.e2e, pytest.mark.timeout(120)]

CHOICE = "from worker_svc.devices import open_device; print(open_device('auto').name)"
MEMORY = """
import torch
from worker_svc.devices import open_device
from worker_svc.devices.registry import DeviceOptions
device = open_device("rbln", DeviceOptions(compile_only={blind}))
before = device.free_memory()
held = torch.zeros(1 << 20).to("rbln")
print(before, device.free_memory(), {asked}, flush=True)
del held
"""


OLDER_DRIVER = """
import torch_rbln.memory
from worker_svc.devices import open_device
def refuse():
    raise RuntimeError("the driver has no such query")
torch_rbln.memory.mem_get_info = refuse
device = open_device("rbln")
print(device.free_memory(), device.free_memory(), flush=True)
"""


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=100, check=False,
        env=environment(**variables),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, True),
        ({"STUB_RBLN_NPU": ""}, False),
        ({"RBLN_DUMMY_DEVICE": "1"}, False),
        ({"LD_LIBRARY_PATH": ""}, False),
    ],
    ids=["present", "absent", "dummy", "without its runtime"],
)
def test_auto_is_an_npu_that_can_be_used(variables: dict[str, str], found: bool) -> None:
    done = run("-c", CHOICE, **variables)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert (lines[-1] == "rbln") is found
    assert sum("device_chosen" in line for line in lines) == 1
    assert any("npu_unusable" in line for line in lines) is ("LD_LIBRARY_PATH" in variables)


def test_memory_is_what_the_driver_can_give() -> None:
    """No table lists this chip. The size stays, because the number of blocks is part of compiled code."""
    done = run(
        "-c", MEMORY.format(blind=False, asked="torch.rbln.mem_get_info()[1]"), STUB_RBLN_NPU="RBLN-XY1"
    )
    assert done.returncode == 0, done.stderr
    before, after, asked = done.stdout.splitlines()[-1].split()
    assert before == after == asked


def test_older_drivers_are_asked_once() -> None:
    """Every report of a worker contains the memory. The estimate follows from the chip's name."""
    done = run("-c", OLDER_DRIVER, STUB_RBLN_NPU="RBLN-CA25")
    assert done.returncode == 0, done.stderr
    assert f"{16 * 2**30 - 288 * 2**20} {16 * 2**30 - 288 * 2**20}" in done.stdout
    assert done.stdout.count("npu_memory_estimated") == 1


def test_memory_of_an_absent_npu_follows_from_its_name() -> None:
    """Compiling without an NPU opens the vendor's dummy device, and tensors on it exist."""
    done = run(
        "-c", MEMORY.format(blind=True, asked="torch.rbln.is_dummy_device()"),
        STUB_RBLN_NPU="", RBLN_TARGET_SOC="RBLN-CA25",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    before, after, dummy = done.stdout.splitlines()[-1].split()
    assert before == after == str(16 * 2**30 - 288 * 2**20)
    assert dummy == "True"


def test_output_of_the_vendor_is_no_output_of_a_command() -> None:
    """The vendor's library logs to standard output."""
    done = run("-m", "deploy.cli", "doctor", "--device", "rbln", "--json", TORCH_RBLN_LOG_LEVEL="DEBUG")
    assert done.returncode == 0, done.stderr
    assert {check["name"] for check in json.loads(done.stdout)["checks"]} >= {"attention", "precision"}
    assert "][I] " in done.stderr


@pytest.mark.slow
def test_output_of_the_vendor_is_no_output_of_triptych_compile(tmp_path: Path) -> None:
    """Progress and the result are on standard output, the vendor's and our log lines on standard error."""
    model = tiny_models.write("llama", tmp_path / "model")
    done = run(
        "-m", "deploy.cli", "compile", "--model", str(model), "--device", "rbln", "--max-num-seqs", "1",
        "--max-model-len", "128", "--kv-memory", "0.05", "--compile-cache-dir", str(tmp_path / "code"),
        TORCH_RBLN_LOG_LEVEL="DEBUG",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *progress, result = done.stdout.splitlines()
    assert {line.split(" ")[0] for line in progress} == {"load", "allocate", "compile", "warm"}
    assert "pieces compiled" in result
    assert "][I] " in done.stderr
