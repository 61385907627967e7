"""Facts of a CUDA device without a GPU, and values on their way to a device."""

import pytest
import torch

from worker_svc.devices.base import upload
from worker_svc.devices.cuda.device import CudaDevice
from worker_svc.devices.registry import DeviceOptions


def test_free_memory_is_that_of_the_ranks_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a thread on which another GPU is current, such as the event loop's."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=0: (100 + device, 1000))
    assert CudaDevice(DeviceOptions(local_rank=5)).free_memory() == 101


def test_values_arrive_in_order_and_of_the_wanted_type() -> None:
    """A device without page-locked memory gets an ordinary copy."""
    uploaded = upload([3, 1, 2], torch.device("cpu"), torch.int32)
    assert uploaded.tolist() == [3, 1, 2]
    assert uploaded.dtype == torch.int32
    assert upload([], torch.device("cpu")).dtype == torch.int64
    assert upload([(1, 2), (3, 4)], torch.device("cpu")).tolist() == [[1, 2], [3, 4]]
