"""Values on their way to the device."""

import torch

from worker_svc.devices.base import upload


def test_values_arrive_in_order_and_of_the_wanted_type() -> None:
    """A device without page-locked memory gets an ordinary copy."""
    uploaded = upload([3, 1, 2], torch.device("cpu"), torch.int32)
    assert uploaded.tolist() == [3, 1, 2]
    assert uploaded.dtype == torch.int32
    assert upload([], torch.device("cpu")).dtype == torch.int64
    assert upload([(1, 2), (3, 4)], torch.device("cpu")).tolist() == [[1, 2], [3, 4]]
