"""Copies of the host's values to the device that do not wait for the device's work."""

from collections.abc import Sequence

import torch


def upload(
    values: Sequence[float] | Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Returns numbers as a tensor on the device.

    From ordinary memory, a copy to a GPU waits for all earlier launches. From page-locked memory it only
    takes its place in the stream.

    Args:
        values: the numbers, or rows of equal length.
        device: the tensor's device.
        dtype: the tensor's type.
    """
    # The allocator keeps page-locked memory until the copy is done.
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
