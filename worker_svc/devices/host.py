"""The host's side of a device: shared memory, and copies that do not wait for the device's work."""

from collections.abc import Sequence

import torch


def is_host(device: torch.device) -> bool:
    """Whether tensors on the device are in the host's memory."""
    return device.type == "cpu"


def takes_page_locked(device: torch.device) -> bool:
    """Whether copies to the device from page-locked memory take their place in its stream.

    From ordinary memory, a copy to such a device waits for all earlier launches.
    """
    return device.type == "cuda"


def upload(
    values: Sequence[float] | Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Returns numbers as a tensor on the device, without waiting for its work.

    Args:
        values: the numbers, or rows of equal length.
        device: the tensor's device.
        dtype: the tensor's type.
    """
    # The allocator keeps page-locked memory until the copy is done.
    host = torch.tensor(values, dtype=dtype, pin_memory=takes_page_locked(device))
    return host.to(device, non_blocking=True)
