"""One file a device behind the interface in ``base``."""

from collections.abc import Callable
from typing import Literal

from worker_svc.devices.base import Device

DeviceName = Literal["cpu", "cuda", "rbln"]


def open_device(name: DeviceName) -> Device:
    """The device of that name, checked to be usable.

    Raises:
        ConfigurationRefused: in one line, what is missing.
    """
    device = _OPENERS[name]()
    device.check_available()
    return device


def _cpu() -> Device:
    from worker_svc.devices.cpu import CpuDevice

    return CpuDevice()


def _cuda() -> Device:
    from worker_svc.devices.cuda import CudaDevice

    return CudaDevice()


def _rbln() -> Device:
    from worker_svc.devices.rbln import RblnDevice

    return RblnDevice()


_OPENERS: dict[DeviceName, Callable[[], Device]] = {"cpu": _cpu, "cuda": _cuda, "rbln": _rbln}

__all__ = ["Device", "DeviceName", "open_device"]
