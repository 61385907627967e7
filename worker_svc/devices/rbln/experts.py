"""The vendor's operator for a whole expert layer, and a reference of it.

Older plugins chose between two forms (`VLLM_RBLN_MOE_USE_OPT_KERNEL`, `VLLM_RBLN_MOE_CUSTOM_KERNEL`).
vllm-rbln 0.11.2 and 0.12.0 call the same operator for both settings, and so do we. Neither wheel documents
the result. The reference follows the arguments and the plugin's use of the result: the sum of the experts'
gated MLPs by routing weight.
"""

from typing import Any, Final

import torch

from worker_svc.devices.base import EXPERT_ACTIVATIONS

OPERATOR: Final = "custom_moe_glu"
ARGUMENTS: Final = (
    "hidden_states",
    "gate_proj_weight",
    "up_proj_weight",
    "down_proj_weight",
    "masked_routing_weights",
    "layer.activation.value",
    "layer.expert_map",
    "None",
    "None",
    "None",
)
"""The arguments that the plugin passes, by its own names. The last three are for quantized experts."""

_SCHEMA: Final = (
    f"{OPERATOR}(Tensor hidden_states, Tensor gate_proj_weight, Tensor up_proj_weight,"
    " Tensor down_proj_weight, Tensor masked_routing_weights, str activation, Tensor? expert_map,"
    " Tensor? gate_proj_scale, Tensor? up_proj_scale, Tensor? down_proj_scale) -> Tensor"
)


def emit_experts(
    hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, activation: str
) -> torch.Tensor:
    """Calls the operator, with arguments and result of `Device.run_experts`.

    A rank with a part of the experts passes a layer of these, so it needs no `expert_map`.
    """
    inner = down.shape[-1]
    operator: Any = torch.ops.rbln_custom_ops.custom_moe_glu
    mixed: torch.Tensor = operator(
        hidden, gate_up[:, :inner, :], gate_up[:, inner:, :], down, weights.t(), activation, None, None, None, None
    )  # fmt: skip
    return mixed


def register(library: torch.library.Library) -> None:
    """Registers the reference and a fake, unless the vendor has registered the operator.

    Args:
        library: of the namespace `rbln_custom_ops`.
    """
    if hasattr(torch.ops.rbln_custom_ops, OPERATOR):
        return
    library.define(_SCHEMA)
    library.impl(OPERATOR, reference, "CPU")
    torch.library.register_fake(f"rbln_custom_ops::{OPERATOR}", _fake, lib=library, allow_override=False)


def reference(
    hidden: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    activation: str,
    expert_map: torch.Tensor | None,
    *scales: torch.Tensor | None,
) -> torch.Tensor:
    """Sums the experts' gated MLPs by weight, in float32, expert after expert.

    Args:
        hidden: [tokens, hidden].
        gate: [local experts, inner, hidden].
        up: like `gate`.
        down: [local experts, hidden, inner].
        weights: [experts, tokens]; an expert's MLP counts only for tokens with a weight other than 0.
        activation: a key of `base.EXPERT_ACTIVATIONS`.
        expert_map: integers [experts], the index of each expert in `gate`, `up` and `down`, -1 for those of
            other ranks; `None` if `weights` covers exactly these experts.
        *scales: of quantized experts; must be `None`.

    Returns:
        Like `hidden`.

    Raises:
        ValueError: for unsupported shapes, activations or scales.
    """
    check(hidden, gate, up, down, weights, activation, expert_map, *scales)
    rows = range(len(weights)) if expert_map is None else expert_map.tolist()
    wide = hidden.float()
    total = torch.zeros_like(wide)
    for expert, local in enumerate(rows):
        if local < 0:
            continue
        gated = EXPERT_ACTIVATIONS[activation](wide @ gate[local].float().t()) * (
            wide @ up[local].float().t()
        )
        shares = weights[expert].float().unsqueeze(-1)
        # An unused expert may overflow, and 0 times infinity is NaN.
        total += (gated @ down[local].float().t() * shares).masked_fill(shares == 0, 0)
    return total.to(hidden.dtype)


def check(
    hidden: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    activation: str,
    expert_map: torch.Tensor | None,
    *scales: torch.Tensor | None,
) -> None:
    """Refuses arguments that the operator does not take. Checks shapes and types only.

    Raises:
        ValueError: names the argument and its expected shape.
    """
    experts, inner, size = gate.shape
    tokens = hidden.shape[0]
    routed = experts if expert_map is None else len(expert_map)
    expected = {
        "hidden_states": (hidden, (tokens, size)),
        "up_proj_weight": (up, (experts, inner, size)),
        "down_proj_weight": (down, (experts, size, inner)),
        "masked_routing_weights": (weights, (routed, tokens)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape or tensor.dtype != hidden.dtype:
            raise ValueError(
                f"{OPERATOR}: {name} must be {list(shape)} {hidden.dtype}, got {list(tensor.shape)} {tensor.dtype}"
            )
    if activation not in EXPERT_ACTIVATIONS:
        raise ValueError(f"{OPERATOR}: there is no activation {activation!r}")
    if any(scale is not None for scale in scales):
        raise ValueError(f"{OPERATOR} has no reference for quantized experts")


def _fake(*arguments: Any) -> torch.Tensor:
    check(*arguments)
    hidden: torch.Tensor = arguments[0]
    return torch.empty_like(hidden)
