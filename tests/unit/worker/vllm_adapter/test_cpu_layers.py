"""The layers that CPUs take from us, with our kernels and without them."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from worker_svc.vllm_adapter import startup

pytestmark = pytest.mark.filterwarnings("ignore")  # importing vLLM


@pytest.fixture(params=["ours", "none"])
def layers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with our kernels where they are available or with none."""
    startup.prepare("cpu")
    from worker_svc.vllm_adapter.layers import cpu_layers

    if request.param == "none":
        monkeypatch.setattr(cpu_layers, "kernels", lambda: None)
        monkeypatch.setattr(cpu_layers, "product_kernels", lambda _: None)
    torch.manual_seed(0)
    return cpu_layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norms_of_a_model(layers: Any, dtype: torch.dtype) -> None:
    """All layer norms of a model are replaced; matrices, wider tensors and two dimensions are served."""
    one, two = torch.nn.LayerNorm(70).to(dtype), torch.nn.LayerNorm((3, 70)).to(dtype)
    model = torch.nn.ModuleList([one, two])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    layers.use_own_layer_norms(model)
    assert all(type(norm) is layers.CpuLayerNorm for norm in model)
    for norm, shape in ((one, (5, 70)), (one, (2, 5, 70)), (two, (3, 70))):
        x = torch.randn(shape).to(dtype)
        expected = functional.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
        torch.testing.assert_close(norm(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_of_a_model(layers: Any, dtype: torch.dtype) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        gelu = layers.CpuGelu()
    for x in (torch.randn(4, 6), torch.randn(6, 4).t()):
        given = x.to(dtype)
        torch.testing.assert_close(gelu.forward_cpu(given), functional.gelu(given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("remove_weight", [True, False])
def test_products_in_float32(layers: Any, remove_weight: bool) -> None:
    """A linear layer and a tied head; an input with another layout gives the same."""
    layer: Any = torch.nn.Linear(17, 40, bias=True)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach()
    layers.dispatch_gemm(layer, remove_weight)
    if remove_weight and layers.kernels() is not None:
        assert layer.weight.numel() == 0
    x = torch.randn(3, 17)
    # oneDNN's products take no other layouts.
    layouts = (x.t().contiguous().t(),) if layers.kernels() is not None else ()
    for given in (x, x[:, None], *layouts):
        product = layer.cpu_linear(given, layer.weight, bias)
        torch.testing.assert_close(product, functional.linear(given, weight, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layers", ["ours"], indirect=True)
def test_activations_of_another_type_are_an_error(layers: Any) -> None:
    if layers.kernels() is None:
        pytest.skip("our kernels are unavailable")
    layer: Any = torch.nn.Linear(16, 8, bias=False)
    layers.dispatch_gemm(layer, remove_weight=True)
    with pytest.raises(
        TypeError, match=r"for activations in torch.float32 got activations in torch.bfloat16"
    ):
        layer.cpu_linear(torch.randn(2, 16).bfloat16(), layer.weight, None)
