"""Devices that are absent or broken."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from worker_svc.devices.cuda.device import CudaDevice
from worker_svc.devices.registry import RBLN_PACKAGES, DeviceOptions, choose_device


def test_free_memory_is_that_of_the_ranks_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a thread on which another GPU is current, such as the event loop's."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=0: (100 + device, 1000))
    assert CudaDevice(DeviceOptions(local_rank=5)).free_memory() == 101


def test_a_broken_package_of_an_npu_leaves_the_choice_to_other_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A package of another version may lack what is asked."""
    for name in RBLN_PACKAGES:
        package = ModuleType(name)
        package.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, package)
    assert choose_device("auto") != "rbln"
