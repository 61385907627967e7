"""The Triton kernel of LoRA adapters against the plain operators, on a GPU or in Triton's interpreter."""

import pytest
import torch
from torch.nn import functional

from worker_svc.devices.base import Device
from worker_svc.devices.cuda.device import CudaDevice
from worker_svc.devices.cuda.lora_stack import TritonStack
from worker_svc.devices.lora_stack import LayerWeights, LoraStack, StackShape

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32] + [torch.bfloat16] * (DEVICE.type == "cuda")


def _weights(shape: StackShape, rank: int, parts: set[int]) -> LayerWeights:
    return [
        (torch.randn(rank, shape.in_size), torch.randn(size, rank) / rank) if part in parts else None
        for part, size in enumerate(shape.out_sizes)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "out_sizes", "max_loras", "rank"),
    [(5, (96, 64, 32), 3, 8), (1, (70,), 1, 16), (19, (33, 130), 5, 30), (16, (64,), 2, 2)],
)
def test_the_kernel_equals_plain_operators(
    dtype: torch.dtype, joined: bool, bias: bool, rows: int, out_sizes: tuple[int, ...], max_loras: int, rank: int
) -> None:  # fmt: skip
    """Beside the layer's weights or apart from them, each row gets the products of its own adapter."""
    torch.manual_seed(rows)
    shape = StackShape(24, out_sizes, max_loras, rank, dtype, dtype)
    stack = TritonStack(shape, DEVICE)
    assert TritonStack.num_bytes(shape) == stack._a.nbytes + stack._b.nbytes
    a, b = (torch.zeros(size, dtype=dtype, device=DEVICE) for size in LoraStack.sizes(shape))
    plain = LoraStack(shape, a, b)
    weight = torch.nn.Parameter(
        torch.randn(sum(out_sizes), 24, dtype=dtype, device=DEVICE), requires_grad=False
    )
    expected_weight = weight.clone()
    if joined:
        stack.join(weight)
        assert torch.equal(weight, expected_weight)
    for slot in range(max_loras):
        weights = _weights(shape, max(1, rank - slot), {slot % len(out_sizes), 0})
        for each in (stack, plain):
            each.write(slot, _weights(shape, rank, set(range(len(out_sizes)))))
            each.write(slot, weights)
    x = torch.randn(rows, 24, dtype=dtype, device=DEVICE)
    added = torch.randn(sum(out_sizes), dtype=dtype, device=DEVICE) if bias else None
    slots = (torch.arange(rows, dtype=torch.int32, device=DEVICE) % (max_loras + 1)) - 1
    device = CudaDevice()

    def product() -> torch.Tensor:
        return functional.linear(x, weight, added)

    got = stack.apply(product, x, added, device.select_adapters(slots, shape))
    expected = plain.apply(product, x, added, Device.select_adapters(device, slots, shape))
    rtol, atol = (1e-5, 1e-4) if dtype == torch.float32 else (2e-2, 0.2)
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)
    base = slots < 0
    # A product of other sizes may sum in another order.
    torch.testing.assert_close(got[base], product()[base], rtol=rtol, atol=atol)
