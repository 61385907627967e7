"""One file a device behind the interface in ``base``."""

from collections.abc import Callable
from typing import Literal

from worker_svc.devices.base import Device, DeviceOptions

DeviceName = Literal["cpu", "cuda", "rbln"]


def open_device(name: DeviceName, options: DeviceOptions | None = None) -> Device:
    """The device of that name, checked to be usable.

    Args:
        name: as in the setting.
        options: what only some devices heed; default ones if ``None``.

    Raises:
        ConfigurationRefused: in one line, what is missing.
    """
    device = _OPENERS[name](options or DeviceOptions())
    device.check_available()
    return device


def _cpu(_: DeviceOptions) -> Device:
    from worker_svc.devices.cpu import CpuDevice

    return CpuDevice()


def _cuda(_: DeviceOptions) -> Device:
    from worker_svc.devices.cuda import CudaDevice

    return CudaDevice()


def _rbln(options: DeviceOptions) -> Device:
    from worker_svc.devices.rbln import RblnDevice

    return RblnDevice(options)


_OPENERS: dict[DeviceName, Callable[[DeviceOptions], Device]] = {"cpu": _cpu, "cuda": _cuda, "rbln": _rbln}

__all__ = ["Device", "DeviceName", "DeviceOptions", "open_device"]
