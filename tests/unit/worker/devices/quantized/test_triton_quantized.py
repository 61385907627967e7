"""The Triton kernels for quantized weights, compared with float64, on a GPU or in Triton's interpreter."""

import pytest
import torch

from tests.support.quantized_models import exact_weights
from worker_svc.devices.cuda import quantized, triton_quantized
from worker_svc.devices.cuda.quantized import TritonProducts
from worker_svc.devices.quantized import PlainQuantizedLinear, QuantizedWeights

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter multiplies bfloat16 as if it were integers.
DTYPE = torch.bfloat16 if ON_GPU else torch.float16


def _weights(outputs: int, inputs: int, groups: int, bits: int) -> QuantizedWeights:
    torch.manual_seed(0)
    codes = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8, device=DEVICE)
    return QuantizedWeights(codes, (torch.rand(outputs, groups, device=DEVICE) / 8).to(DTYPE), bits)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("outputs", "inputs", "groups"), [(48, 256, 4), (33, 192, 6), (20, 256, 2), (17, 200, 1)]
)
@pytest.mark.parametrize("rows", [1, 3, 4, 17, 65])
def test_products_equal_float64(rows: int, outputs: int, inputs: int, groups: int, bits: int) -> None:
    """Few rows, more rows and chunks, with and without a bias, for groups and padding of any kind."""
    _compare(rows, outputs, inputs, groups, bits)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("outputs", "inputs", "groups"), [(5, 8192, 128), (3, 4352, 34), (2, 4200, 1)])
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_long_rows(rows: int, outputs: int, inputs: int, groups: int, bits: int) -> None:
    """The kernels' loops run several times, and part of their last run may be padding."""
    _compare(rows, outputs, inputs, groups, bits)


@pytest.mark.parametrize("rows", [2, pytest.param(33, marks=pytest.mark.slow)])
def test_many_outputs(rows: int) -> None:
    _compare(rows, 8200, 192, 3, 4)


def _compare(rows: int, outputs: int, inputs: int, groups: int, bits: int) -> None:
    weights = _weights(outputs, inputs, groups, bits)
    x = torch.randn(rows, inputs + 8, device=DEVICE).to(DTYPE)[:, :inputs]
    bias = torch.randn(outputs, device=DEVICE).to(DTYPE) if rows % 2 else None
    words = triton_quantized.pack(weights)
    out = triton_quantized.multiply(x, words, weights.scales, bits, bias)
    expected = x.double() @ exact_weights(weights).t() + (0 if bias is None else bias.double())
    assert out.dtype == DTYPE
    largest = float(expected.abs().max())
    # A chunk's weights are rounded, too.
    tolerance = torch.finfo(DTYPE).eps * (4 if rows > triton_quantized.MANY_ROWS else 1)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize(("inputs", "groups"), [(576, 9), (200, 1), (72, 9), (192, 2)])
@pytest.mark.parametrize("dtype", [DTYPE, torch.float32])
def test_memory_is_known_before(inputs: int, groups: int, dtype: torch.dtype) -> None:
    """The announced size is that of the layer; types and groups without a kernel are plain PyTorch."""
    weights = _weights(10, inputs, groups, 4)
    layer = TritonProducts().layer(weights, dtype, wide=False)
    assert isinstance(layer, PlainQuantizedLinear) == (dtype == torch.float32 or inputs in (72, 192))
    stored = sum(parameter.nbytes for parameter in layer.parameters())
    assert stored == TritonProducts().num_bytes(10, inputs, groups, 4, dtype)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_layout_and_type_of_activations(rows: int) -> None:
    """Activations of any strides give the same bits, and those of another type are an error."""
    layer = TritonProducts().layer(_weights(48, 256, 4, 4), DTYPE, wide=False)
    x = torch.randn(rows, 256, device=DEVICE).to(DTYPE)
    with torch.library._scoped_library("triptych_cuda", "IMPL") as library:
        if not ON_GPU:
            library.impl("quantized_linear", quantized._run, "CPU")
        expected = layer(x, None)
        for same in (x.repeat_interleave(2, dim=1)[:, ::2], x.t().contiguous().t()):
            assert torch.equal(layer(same, None), expected)
        other = torch.float16 if ON_GPU else torch.bfloat16
        with pytest.raises(TypeError, match=f"for activations in {DTYPE} got activations in {other}"):
            layer(x.to(other), None)


@pytest.mark.skipif(not ON_GPU, reason="the operator runs on GPUs alone")
@pytest.mark.parametrize("rows", [1, 2])
def test_the_operator_is_captured(rows: int) -> None:
    layer = TritonProducts().layer(_weights(48, 256, 4, 4), DTYPE, wide=False)
    x = torch.randn(rows, 256, device=DEVICE).to(DTYPE)
    expected = layer(x, None)
    static = torch.zeros_like(x)
    for _ in range(2):
        layer(static, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(static, None)
    static.copy_(x)
    graph.replay()
    torch.testing.assert_close(out, expected)
