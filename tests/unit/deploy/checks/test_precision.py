"""The doctor finds the type in which a compiler computes."""

from collections.abc import Callable

import pytest
import torch

from deploy.checks import device as device_checks
from deploy.checks.check_results import Report
from worker_svc.devices.rbln.device import RblnDevice
from worker_svc.devices.registry import DeviceOptions


class RoundingDevice(RblnDevice):
    """An NPU whose compiler computes in a type of its own choice."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(DeviceOptions(rbln_backend="rbln-check"))
        self._dtype = dtype

    def compile(
        self, function: Callable[..., torch.Tensor], *, by_shape: bool = False
    ) -> Callable[..., torch.Tensor]:
        compiled = super().compile(function, by_shape=by_shape)

        def run(*arguments: torch.Tensor) -> torch.Tensor:
            return compiled(*(each.to(self._dtype).float() for each in arguments)).to(self._dtype).float()

        return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_computing_type_is_found(dtype: torch.dtype) -> None:
    device = RoundingDevice(dtype)
    device.check_available()
    assert device_checks.check(device, Report("triptych worker", as_json=True), runs=True) == dtype
