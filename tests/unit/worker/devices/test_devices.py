"""Facts of a CUDA device without a GPU."""

import pytest
import torch

from worker_svc.devices.cuda.device import CudaDevice
from worker_svc.devices.registry import DeviceOptions


def test_free_memory_is_that_of_the_ranks_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a thread on which another GPU is current, such as the event loop's."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=0: (100 + device, 1000))
    assert CudaDevice(DeviceOptions(local_rank=5)).free_memory() == 101
