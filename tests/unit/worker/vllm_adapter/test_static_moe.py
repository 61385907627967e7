"""Expert layers in plain operators of static shape, and an NPU's operator for them."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.support.operator_calls import OperatorCalls
from worker_svc.devices import open_device
from worker_svc.devices.base import ExpertActivation
from worker_svc.devices.rbln import operators
from worker_svc.devices.registry import DeviceOptions
from worker_svc.settings import Settings

TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 5, 8, 12, 4, 2


def make_layer() -> dict[str, Any]:
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


def token_by_token(layer: dict[str, Any], activate: Any) -> torch.Tensor:
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
    layer = make_layer()
    mixed = open_device("cpu").run_experts(**layer, activation=activation)
    assert torch.allclose(mixed, token_by_token(layer, activate), atol=1e-5)


def test_experts_of_gpt_oss_have_biases_and_clamp_alternating_gates() -> None:
    """Gates and up projections alternate, are clamped at 7, and both projections add a bias."""
    layer = make_layer()
    generator = torch.Generator().manual_seed(1)
    biases = (
        torch.randn(EXPERTS, 2 * INNER, generator=generator),
        torch.randn(EXPERTS, HIDDEN, generator=generator),
    )
    layer["hidden"] *= 4  # beyond the clamps
    expected = torch.zeros_like(layer["hidden"])
    for token, expert in layer["weights"].nonzero().tolist():
        projected = layer["gate_up"][expert] @ layer["hidden"][token] + biases[0][expert]
        gate, up = projected[::2].clamp(max=7), projected[1::2].clamp(-7, 7)
        mixed = layer["down"][expert] @ (gate * torch.sigmoid(1.702 * gate) * (up + 1)) + biases[1][expert]
        expected[token] += layer["weights"][token, expert] * mixed
    for device in (open_device("cpu"), open_device("rbln", DeviceOptions("rbln-check"))):
        result = device.run_experts(**layer, activation="swigluoai", biases=biases)
        assert torch.allclose(result, expected, atol=1e-4)


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


@pytest.mark.parametrize(
    ("optimized", "custom", "is_operator"),
    [("1", "0", True), ("0", "1", True), ("0", "0", False), ("", "", True)],
)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_an_npu_runs_the_vendors_operator_unless_both_variables_are_off(
    monkeypatch: pytest.MonkeyPatch,
    optimized: str,
    custom: str,
    activation: ExpertActivation,
    *,
    is_operator: bool,
) -> None:
    """The vendor's variables choose. Operator and plain layer compute the same from different layouts."""
    if optimized:
        monkeypatch.setenv("VLLM_RBLN_MOE_USE_OPT_KERNEL", optimized)
        monkeypatch.setenv("VLLM_RBLN_MOE_CUSTOM_KERNEL", custom)
    settings = Settings(model="m")
    options = DeviceOptions(
        "rbln-check",
        rbln_moe_use_opt_kernel=settings.rbln_moe_use_opt_kernel,
        rbln_moe_custom_kernel=settings.rbln_moe_custom_kernel,
    )
    layer = make_layer()
    with OperatorCalls(operators.CUSTOM) as found:
        mixed = open_device("rbln", options).run_experts(**layer, activation=activation)
    assert torch.allclose(mixed, open_device("cpu").run_experts(**layer, activation=activation), atol=1e-5)
    calls = [given for name, given in found.calls if name == f"{operators.CUSTOM}::{operators.EXPERTS}"]
    assert bool(calls) == is_operator
    if is_operator:
        ((_, gate, up, down, weights, *_),) = calls
        assert torch.equal(torch.cat([gate, up], dim=1), layer["gate_up"])
        assert torch.equal(weights, layer["weights"].t())
        assert down.shape == (EXPERTS, HIDDEN, INNER)


def operator_arguments() -> dict[str, Any]:
    layer = make_layer()
    gate, up = layer["gate_up"].chunk(2, dim=1)
    return {
        "hidden": layer["hidden"], "gate": gate, "up": up, "down": layer["down"], "weights": layer["weights"].t(),
        "activation": "silu", "expert_map": None,
    }  # fmt: skip


def test_an_expert_map_selects_a_ranks_experts() -> None:
    """The ranks' parts add up to the whole layer; a map says where each rank has its experts."""
    given = operator_arguments()
    whole = operators.experts_reference(**given)
    total = torch.zeros_like(whole)
    for rank in range(2):
        own = slice(rank * 2, rank * 2 + 2)
        expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
        expert_map[own] = torch.arange(2, dtype=torch.int32)
        part = {name: given[name][own] for name in ("gate", "up", "down")}
        with_map = operators.experts_reference(**given | part | {"expert_map": expert_map})
        # This is how the device calls it: a layer of the rank's own experts.
        assert torch.equal(
            with_map, operators.experts_reference(**given | part | {"weights": given["weights"][own]})
        )
        total += with_map
    assert torch.allclose(total, whole, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"weights": torch.zeros(TOKENS, EXPERTS)}, r"masked_routing_weights must be \[4, 5\] torch.float32"),
        ({"up": torch.zeros(EXPERTS, HIDDEN, INNER)}, r"up_proj_weight must be \[4, 12, 8\]"),
        ({"down": torch.zeros(EXPERTS, HIDDEN, INNER, dtype=torch.bfloat16)}, "got .* torch.bfloat16"),
        ({"activation": "relu"}, "no activation 'relu'"),
    ],
)
def test_the_reference_refuses_what_the_operator_does_not_take(change: dict[str, Any], reason: str) -> None:
    """Wrong shapes, types and names are errors that name the argument, also while a graph is traced."""
    with pytest.raises(ValueError, match=reason):
        operators.experts_reference(**operator_arguments() | change)
