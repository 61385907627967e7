"""Our own products with quantized weights, compared with products in float64."""

import pytest
import torch

from tests.support.quantized_models import exact_weights
from worker_svc.devices.cpu.device import CpuDevice
from worker_svc.devices.cpu.kernels.program import Kernels
from worker_svc.devices.quantized import PlainQuantizedLinear, QuantizedWeights


def _weights(outputs: int, inputs: int, group: int, bits: int, largest: float = 0.01) -> QuantizedWeights:
    scales = (torch.rand(outputs, inputs // group) * largest).bfloat16().float()
    return QuantizedWeights(torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8), scales, bits)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("outputs", "inputs", "group"),
    [(960, 576, 64), (70, 256, 32), (33, 128, 128), (1, 8, 8), (2080, 1536, 1536), (64, 40, 40)],
)
def test_products_equal_float64(kernels: Kernels, outputs: int, inputs: int, group: int, bits: int) -> None:
    """For 1 to 40 rows of any stride, float32 results are as near as float32 sums are."""
    weights = _weights(outputs, inputs, group, bits)
    packed, factor = kernels.pack_codes(weights.codes, weights.scales, bits)
    bias = torch.randn(outputs).bfloat16()
    for rows in (1, 2, 3, 7, 11, 12, 13, 24, 25, 32, 40):
        x = torch.randn(rows, inputs + 6).bfloat16()[:, :inputs]
        expected = x.double() @ exact_weights(weights).t() + bias.double()
        out = torch.full((rows, outputs), torch.nan)
        kernels.quantized(x, packed, factor, bits, bias, out)()
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
        half = torch.full((rows, outputs), torch.nan, dtype=torch.bfloat16)
        kernels.quantized(x, packed, factor, bits, bias, half)()
        assert torch.equal(half, out.bfloat16())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [64, 576])
def test_rows_do_not_depend_on_their_neighbours(kernels: Kernels, bits: int, group: int) -> None:
    weights = _weights(192, 576, group, bits)
    packed, factor = kernels.pack_codes(weights.codes, weights.scales, bits)
    x = torch.randn(128, 576).bfloat16()
    together = torch.empty(128, 192)
    kernels.quantized(x, packed, factor, bits, None, together)()
    for count in (1, 5, 12):
        for row in (0, 11, 64, 116):
            some = torch.empty(count, 192)
            kernels.quantized(x[row : row + count], packed, factor, bits, None, some)()
            assert torch.equal(some, together[row : row + count])


@pytest.mark.parametrize("largest", [1e-30, 1e-6, 1.0, 1e20])
def test_scales_of_any_size(kernels: Kernels, largest: float) -> None:
    """Scales far outside of float16's range lose nothing, and neither do zeros among them."""
    weights = _weights(40, 128, 32, 4, largest)
    weights.scales[5] = 0
    packed, factor = kernels.pack_codes(weights.codes, weights.scales, 4)
    x, out = torch.randn(3, 128).bfloat16(), torch.empty(3, 40)
    kernels.quantized(x, packed, factor, 4, None, out)()
    expected = x.double() @ exact_weights(weights).t()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.usefixtures("kernels")
def test_the_layout_and_type_of_activations() -> None:
    """Activations of any strides give the same bits, and those of another type are an error."""
    layer = CpuDevice().quantized.layer(_weights(70, 64, 32, 4), torch.bfloat16, wide=False)
    x = torch.randn(3, 64).bfloat16()
    for same in (x.t().contiguous().t(), x.repeat_interleave(2, dim=1)[:, ::2]):
        assert torch.equal(layer(same, None), layer(x, None))
        assert torch.equal(layer(same[:1], None), layer(x[:1], None))
    with pytest.raises(
        TypeError, match=r"for activations in torch.bfloat16 got activations in torch.float32"
    ):
        layer(x.float(), None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wide", [False, True])
def test_the_device_chooses_a_product(dtype: torch.dtype, wide: bool) -> None:
    """Activations of any type and shape are served; logits of our own kernel are float32."""
    weights = _weights(70, 64, 32, 4)
    layer = CpuDevice().quantized.layer(weights, dtype, wide=wide)
    x, bias = torch.randn(2, 3, 64).to(dtype), torch.randn(70).to(dtype)
    out = layer(x, bias)
    is_own = not isinstance(layer, PlainQuantizedLinear)
    assert out.dtype == (torch.float32 if wide and is_own else dtype)
    expected = x.double() @ exact_weights(weights).t() + bias.double()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    stored = sum(parameter.nbytes for parameter in layer.parameters())
    assert stored == CpuDevice().quantized.num_bytes(70, 64, 2, 4, dtype)
    assert stored == (96 * (32 + 4) if is_own else 70 * 64 + 70 * 2 * dtype.itemsize)
