"""Expert layers in plain operators of static shape, and which kernels an NPU's get."""

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


def one_by_one(layer: dict[str, torch.Tensor], activate: Any) -> torch.Tensor:
    """Each token through the experts that it asks, and no others."""
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
def test_experts_are_summed_as_they_are_weighed(activation: ExpertActivation, activate: Any) -> None:
    """All experts run on all tokens, and only what was asked for counts."""
    layer = make_layer()
    mixed = open_device("cpu").run_experts(**layer, activation=activation)
    assert torch.allclose(mixed, one_by_one(layer, activate), atol=1e-5)


def test_what_nobody_asked_does_not_leak() -> None:
    """An expert that overflows hurts those who asked it alone, and a token that is not a number itself alone."""
    layer = make_layer()
    expected = open_device("cpu").run_experts(**layer, activation="silu")
    asked = layer["weights"][:, 1] > 0
    assert asked.any()
    assert not asked.all()
    layer["gate_up"][1] = torch.inf
    mixed = open_device("cpu").run_experts(**layer, activation="silu")
    assert torch.equal(mixed[~asked], expected[~asked])
    layer = make_layer()
    layer["hidden"][2] = torch.nan
    mixed = open_device("cpu").run_experts(**layer, activation="silu")
    others = [0, 1, 3, 4]
    assert torch.allclose(mixed[others], expected[others])


@pytest.fixture
def operator() -> Iterator[list[tuple[Any, ...]]]:
    """The vendor's operator, for a moment: writes down what it is called with."""
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
def test_whose_kernel_an_npu_takes(
    operator: list[tuple[Any, ...]], options: DeviceOptions, is_vendors: bool
) -> None:
    """The vendor's unless it is switched off or not there; with gate and other factor apart, and weights [experts, tokens]."""
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
        assert torch.allclose(mixed, one_by_one(layer, functional.silu), atol=1e-5)


@pytest.mark.parametrize("name", ["VLLM_RBLN_MOE_USE_OPT_KERNEL", "VLLM_RBLN_MOE_CUSTOM_KERNEL"])
def test_the_stand_in_refuses_the_vendors_kernel(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In one line, which says what to leave out; the variables are those of the plugin."""
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
