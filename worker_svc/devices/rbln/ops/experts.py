"""The operator with which the vendor's runtime runs a whole expert layer.

Older plugins chose between two forms of it (`VLLM_RBLN_MOE_USE_OPT_KERNEL`,
`VLLM_RBLN_MOE_CUSTOM_KERNEL`). vllm-rbln 0.11.2 and 0.12.0 call one operator for both settings, and so do
we. Neither wheel documents what it computes, so there is no reference for it.
"""

from typing import Any, Final

import torch

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


def emit_experts(
    hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, activation: str
) -> torch.Tensor:
    """Calls the operator. Arguments and result are those of `Device.run_experts`."""
    inner = down.shape[-1]
    operator: Any = torch.ops.rbln_custom_ops.custom_moe_glu
    mixed: torch.Tensor = operator(
        hidden, gate_up[:, :inner, :], gate_up[:, inner:, :], down, weights.t(), activation, None, None, None, None
    )  # fmt: skip
    return mixed
