"""Devices: the kernels of models, with their interface in `base`.

`attention` defines the kernels' arguments. `cpu`, `cuda` and `rbln` are folders with a `device` module each.
`gather_attention`, `mla` and `sliding_window` are attention in plain PyTorch: the fallback of devices without
such kernels, and the reference of tests. `expert_routing` chooses a token's experts. `upload` copies the
host's values to a device without waiting for it. The rooms above import this one; it imports `shapes`,
`settings` and `protos` only.
"""

import os
from collections.abc import Callable
from typing import Literal

import torch

from worker_svc.devices.base import BlockCopies, Device, DeviceOptions
from worker_svc.settings import Settings

DeviceName = Literal["cpu", "cuda", "rbln"]


def choose_device(setting: Literal["auto"] | DeviceName) -> DeviceName:
    """Returns the device of a setting; `auto` is a GPU if present, else the CPU."""
    if setting != "auto":
        return setting
    # Asks the driver's management library, which leaves CUDA uninitialized in this process.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return "cuda" if torch.cuda.is_available() else "cpu"


def open_device(name: DeviceName, options: DeviceOptions | None = None) -> Device:
    """Opens a device and checks that this machine can use it.

    Args:
        name: as in the setting.
        options: settings that only some devices use; the defaults if `None`.

    Raises:
        ConfigurationRefused: names the missing part.
    """
    device = _OPENERS[name](options or DeviceOptions())
    device.check_available()
    return device


def device_for(settings: Settings) -> Device:
    """Opens the device of a worker's settings.

    Raises:
        ConfigurationRefused: names the missing part.
    """
    if settings.cpu_threads is not None:
        torch.set_num_threads(settings.cpu_threads)
    options = DeviceOptions(
        local_rank=settings.rank if settings.local_rank is None else settings.local_rank,
        rank=settings.rank,
        world_size=settings.layout.world_size,
        rbln_backend=settings.rbln_backend,
        rbln_use_custom_kernel=settings.rbln_use_custom_kernel,
        rbln_use_device_tensor=settings.rbln_use_device_tensor,
        rbln_num_devices=settings.rbln_num_devices_per_local_rank,
        compile_only=settings.compile_only,
        compile_strict=settings.compile_strict,
        rbln_moe_use_opt_kernel=settings.rbln_moe_use_opt_kernel,
        rbln_moe_custom_kernel=settings.rbln_moe_custom_kernel,
    )
    return open_device(choose_device(settings.device), options)


def _cpu(_: DeviceOptions) -> Device:
    from worker_svc.devices.cpu.device import CpuDevice

    return CpuDevice()


def _cuda(options: DeviceOptions) -> Device:
    from worker_svc.devices.cuda.device import CudaDevice

    return CudaDevice(options.local_rank)


def _rbln(options: DeviceOptions) -> Device:
    from worker_svc.devices.rbln.device import RblnDevice

    return RblnDevice(options)


_OPENERS: dict[DeviceName, Callable[[DeviceOptions], Device]] = {"cpu": _cpu, "cuda": _cuda, "rbln": _rbln}

__all__ = [
    "BlockCopies",
    "Device",
    "DeviceName",
    "DeviceOptions",
    "choose_device",
    "device_for",
    "open_device",
]
