"""Expert layers with static shapes: plain operators route, the device runs the experts.

They are registered as out-of-tree layers of vLLM. On CPUs vLLM's own expert kernels stay in use: they write
to tensors of static shape, so a step that uses them can be recorded.
"""

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from protos.errors import ConfigurationRefused
from worker_svc.devices.base import Device, ExpertActivation

_ACTIVATIONS: dict[MoEActivation, ExpertActivation] = {
    MoEActivation.SILU: "silu",
    MoEActivation.GELU: "gelu",
    MoEActivation.GELU_TANH: "gelu_tanh",
}


@MoERunner.register_oot
class StaticMoeRunner(MoERunner):
    """One expert layer: a softmax over the chosen experts, and the weighted sum of their gated MLPs."""

    device: Device
    """Runs the experts; set after the model is built."""

    def __init__(self, layer_name: str, *args: Any, **kwargs: Any) -> None:
        """Takes vLLM's arguments.

        Raises:
            ConfigurationRefused: if this device does not serve this kind of expert layer yet.
        """
        super().__init__(layer_name, *args, **kwargs)
        router, experts = self.router, self.routed_experts
        unserved = {
            "shared experts": self._shared_experts is not None,
            "quantized experts": not isinstance(experts.quant_method, UnquantizedFusedMoEMethod),
            "biased experts": self.moe_config.has_bias,
            "grouped or biased routing": type(router).__name__ != "FusedTopKRouter",
            "routing without a softmax": getattr(router, "scoring_func", "softmax") != "softmax",
            "weights on the experts' inputs": experts.apply_router_weight_on_input,
            "transformed inputs": self.routed_input_transform is not None
            or self.routed_output_transform is not None,
            f"experts with {experts.activation.value}": experts.activation not in _ACTIVATIONS,
        }
        for what, needed in unserved.items():
            if needed:
                raise ConfigurationRefused(
                    f"only device cpu serves models with {what} so far; use it or choose another model"
                )

    def forward(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Maps hidden states [tokens, hidden] and router logits [tokens, experts] to [tokens, hidden]."""
        del input_ids, shared_experts_input  # used only by layers that __init__ refuses
        if self.gate is not None:
            router_logits, _ = self.gate(hidden_states)
        weights = routing_weights(router_logits, self.router.top_k, renormalize=self.router.renormalize)
        experts = self.routed_experts
        mixed = self.device.run_experts(
            hidden_states,
            experts.w13_weight,
            experts.w2_weight,
            weights.to(hidden_states.dtype),
            _ACTIVATIONS[experts.activation],
        )
        scale = self.routed_scaling_factor
        return mixed if scale == 1.0 else mixed * scale


def routing_weights(logits: torch.Tensor, top_k: int, *, renormalize: bool) -> torch.Tensor:
    """Returns the experts' weights for each token, float32 [tokens, experts]: 0 for all but `top_k`.

    Args:
        logits: the router's [tokens, experts].
        top_k: experts that a token uses.
        renormalize: whether the weights of a token add up to 1.
    """
    probabilities = logits.float().softmax(dim=-1)
    chosen, experts = probabilities.topk(top_k, dim=-1)
    if renormalize:
        chosen = chosen / chosen.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter(1, experts, chosen)
