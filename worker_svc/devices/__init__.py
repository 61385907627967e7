"""Devices: the kernels of models, with their interface in `base`.

`registry` lists the devices and imports no torch, so that settings and launchers can ask it. `attention`
defines the kernels' arguments. `cpu`, `cuda` and `rbln` are folders with a `device` module each; no other
room names a device. `plain_attention` is the fallback of devices without such kernels, and the reference of
tests. `expert_routing` chooses a token's experts. The rooms above import this one; it imports `shapes` and
`protos` only.
"""

import pkgutil
from typing import TYPE_CHECKING

from protos.service.logs import get_logger
from worker_svc.devices.registry import DEVICES, DeviceOptions, DeviceSetting, choose_device

if TYPE_CHECKING:
    from worker_svc.devices.base import Device


def open_device(setting: DeviceSetting, options: DeviceOptions | None = None) -> "Device":
    """Opens a device and checks that this machine can use it.

    Raises:
        ConfigurationRefused: names the missing part.
    """
    options = options or DeviceOptions()
    if options.cpu_threads is not None:
        import torch

        torch.set_num_threads(options.cpu_threads)
    chosen = choose_device(setting)
    if setting == "auto":
        get_logger().info("device_chosen", device=chosen)
    device: Device = pkgutil.resolve_name(DEVICES[chosen].implementation)(options)
    device.check_available()
    return device
