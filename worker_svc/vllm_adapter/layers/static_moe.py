"""Expert layers with static shapes: plain operators route, the device runs the experts.

They are registered as out-of-tree layers of vLLM. On CPUs vLLM's own expert kernels stay in use; see
`cpu_moe`.
"""

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from protos.errors import ConfigurationRefused
from worker_svc.devices.base import Device, ExpertActivation
from worker_svc.devices.expert_routing import Routing

_ACTIVATIONS: dict[MoEActivation, ExpertActivation] = {
    MoEActivation.SILU: "silu",
    MoEActivation.GELU: "gelu",
    MoEActivation.GELU_TANH: "gelu_tanh",
    MoEActivation.SWIGLUOAI: "swigluoai",
}


@MoERunner.register_oot
class StaticMoeRunner(MoERunner):
    """An expert layer: the weighted sum of the chosen experts' gated MLPs, plus the shared experts.

    Tensor parallelism splits the inside of every expert. Expert parallelism gives each rank a range of
    experts, and every rank computes all tokens with its own. In both cases, each rank holds a part of the
    sum, also of the shared experts, and a single all-reduce adds the parts.
    """

    device: Device
    """Runs the experts; set after the model is built."""

    def __init__(self, layer_name: str, *args: Any, **kwargs: Any) -> None:
        """Takes vLLM's arguments.

        Raises:
            ConfigurationRefused: if this device does not serve this kind of expert layer yet.
        """
        super().__init__(layer_name, *args, **kwargs)
        experts = self.routed_experts
        routing = Routing.of(self.router)
        unserved = {
            "quantized experts": not isinstance(experts.quant_method, UnquantizedFusedMoEMethod),
            f"the routing of {type(self.router).__name__}": routing is None,
            "weights on the experts' inputs": experts.apply_router_weight_on_input,
            "transformed inputs": self.routed_input_transform is not None
            or self.routed_output_transform is not None,
            f"experts with {experts.activation.value}": experts.activation not in _ACTIVATIONS,
            "clamped activations": self.moe_config.swiglu_limit is not None,
            "experts placed round-robin": experts.expert_placement_strategy != "linear",
        }
        for what, needed in unserved.items():
            if needed:
                raise ConfigurationRefused(
                    f"only device cpu serves models with {what} so far; use it or choose another model"
                )
        assert routing is not None
        self._routing = routing
        # vLLM's linear placement: ranges in the order of ranks, the first ones longer by one.
        parallel = self.moe_config.moe_parallel_config
        count, longer = divmod(self.moe_config.num_experts, parallel.ep_size)
        self._first = parallel.ep_rank * count + min(parallel.ep_rank, longer)

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
        experts = self.routed_experts
        weights = self._routing.spread(router_logits)
        # All ranks route alike; each one keeps the columns of its own experts.
        weights = weights[:, self._first : self._first + experts.local_num_experts]
        mixed = self.device.run_experts(
            hidden_states,
            experts.w13_weight,
            experts.w2_weight,
            weights.to(hidden_states.dtype),
            _ACTIVATIONS[experts.activation],
            (experts.w13_bias, experts.w2_bias) if self.moe_config.has_bias else None,
        )
        shared = None if self._shared_experts is None else self._shared_experts._layer(hidden_states)  # noqa: SLF001
        if self.routed_scaling_factor != 1.0:
            if shared is not None and mixed.dtype == torch.float16:
                # vLLM's decoder layers expect the sum divided by the factor, which keeps it within float16.
                shared = shared * (1.0 / self.routed_scaling_factor)
            else:
                mixed = mixed * self.routed_scaling_factor
        reduced: torch.Tensor = self._maybe_reduce_final_output(
            mixed if shared is None else mixed + shared, trunc_size=None, output_is_reduced=False
        )
        return reduced
