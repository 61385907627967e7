"""Expert layers in plain operators of static shape, and the choice of an NPU's kernel for them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

from protos.errors import ConfigurationRefused
from worker_svc.devices import DeviceOptions, open_device
from worker_svc.devices.base import ExpertActivation
from worker_svc.devices.rbln.device import RblnDevice
from worker_svc.devices.rbln.ops.experts import ARGUMENTS, OPERATOR
from worker_svc.settings import Settings

TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 5, 8, 12, 4, 2


def make_layer() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    chosen = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K, dim=1)
    weights = torch.zeros(TOKENS, EXPERTS).scatter(1, chosen.indices, chosen.values)
    return {
        "hidden": normal(TOKENS, HIDDEN),
        "gate_up": normal(EXPERTS, 2 * INNER, HIDDEN),
        "down": normal(EXPERTS, HIDDEN, INNER),
        "weights": weights,
    }


def token_by_token(layer: dict[str, torch.Tensor], activate: Any) -> torch.Tensor:
    """Runs each token through its own experts only."""
    output = torch.zeros_like(layer["hidden"])
    for token, expert in layer["weights"].nonzero().tolist():
        gate, up = (layer["gate_up"][expert] @ layer["hidden"][token]).chunk(2)
        share = layer["weights"][token, expert]
        output[token] += share * (layer["down"][expert] @ (activate(gate) * up))
    return output


@pytest.mark.parametrize(
    ("activation", "activate"),
    [
        ("silu", functional.silu),
        ("gelu", functional.gelu),
        ("gelu_tanh", lambda gate: functional.gelu(gate, approximate="tanh")),
    ],
)
def test_experts_are_summed_by_weight(activation: ExpertActivation, activate: Any) -> None:
    """Running all experts on all tokens equals running each token's own experts."""
    layer = make_layer()
    mixed = open_device("cpu").run_experts(**layer, activation=activation)
    assert torch.allclose(mixed, token_by_token(layer, activate), atol=1e-5)


def test_unused_experts_do_not_leak() -> None:
    """An expert that overflows affects only tokens that use it, and a NaN token affects only itself."""
    layer = make_layer()
    expected = open_device("cpu").run_experts(**layer, activation="silu")
    uses_it = layer["weights"][:, 1] > 0
    assert uses_it.any()
    assert not uses_it.all()
    layer["gate_up"][1] = torch.inf
    mixed = open_device("cpu").run_experts(**layer, activation="silu")
    assert torch.equal(mixed[~uses_it], expected[~uses_it])
    layer = make_layer()
    layer["hidden"][2] = torch.nan
    mixed = open_device("cpu").run_experts(**layer, activation="silu")
    others = [0, 1, 3, 4]
    assert torch.allclose(mixed[others], expected[others])


@pytest.fixture
def operator() -> Iterator[list[tuple[Any, ...]]]:
    """Registers a fake of the vendor's operator that records its arguments."""
    calls: list[tuple[Any, ...]] = []

    def run(*arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        hidden: torch.Tensor = arguments[0]
        return torch.zeros_like(hidden)

    library: Any = torch.library.Library("rbln_custom_ops", "FRAGMENT")  # type: ignore[no-untyped-call]
    names = [f"a{index}" for index in range(len(ARGUMENTS))]
    types = ["Tensor"] * 5 + ["str"] + ["Tensor?"] * 4
    schema = ", ".join(f"{kind} {name}" for kind, name in zip(types, names, strict=True))
    library.define(f"{OPERATOR}({schema}) -> Tensor")
    library.impl(OPERATOR, run, "CPU")
    yield calls
    library._destroy()


@pytest.mark.parametrize(
    ("options", "is_vendors"),
    [
        (DeviceOptions("rbln"), True),
        (DeviceOptions("rbln", rbln_moe_use_opt_kernel=False, rbln_moe_custom_kernel=True), True),
        (DeviceOptions("rbln", rbln_moe_use_opt_kernel=False), False),
        (DeviceOptions("rbln-check"), False),
    ],
)
def test_an_npu_uses_the_vendors_kernel_if_enabled(
    operator: list[tuple[Any, ...]], options: DeviceOptions, is_vendors: bool
) -> None:
    """The vendor's operator runs unless it is switched off or missing, with its own layout of weights."""
    layer = make_layer()
    mixed = RblnDevice(options).run_experts(**layer, activation="silu")
    assert bool(operator) == is_vendors
    if is_vendors:
        ((hidden, gate, up, down, weights, activation, *rest),) = operator
        assert torch.equal(torch.cat([gate, up], dim=1), layer["gate_up"])
        assert torch.equal(weights, layer["weights"].t())
        assert hidden is not None
        assert down.shape == (EXPERTS, HIDDEN, INNER)
        assert [activation, *rest] == ["silu", None, None, None, None]
    else:
        assert torch.allclose(mixed, token_by_token(layer, functional.silu), atol=1e-5)


@pytest.mark.parametrize("name", ["VLLM_RBLN_MOE_USE_OPT_KERNEL", "VLLM_RBLN_MOE_CUSTOM_KERNEL"])
def test_rbln_check_refuses_the_vendors_kernel(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The refusal is one line that says which flags to omit; the plugin's variables set the same settings."""
    monkeypatch.setenv(name, "1")
    settings = Settings(model="m")
    options = DeviceOptions(
        "rbln-check",
        rbln_moe_use_opt_kernel=settings.rbln_moe_use_opt_kernel,
        rbln_moe_custom_kernel=settings.rbln_moe_custom_kernel,
    )
    with pytest.raises(ConfigurationRefused, match="omit --rbln-moe-use-opt-kernel") as caught:
        open_device("rbln", options)
    assert "\n" not in caught.value.message
