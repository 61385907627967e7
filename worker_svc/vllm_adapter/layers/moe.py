"""Expert layers in place of vLLM's.

On CPUs vLLM's kernels run the experts, after our routing where possible: without groups, vLLM's router for
CPUs ignores a correction bias and refuses sigmoids. Its kernels ignore which experts are local. They write to
tensors of static shape, so a step that uses them can be recorded. On other devices plain operators of static
shape route, and the device runs the experts.
"""

from functools import cache
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
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


class CpuMoeRunner(MoERunner):
    """vLLM's expert layer with our router."""

    router: Any

    def __init__(self, layer_name: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(layer_name, *args, **kwargs)
        experts = self.routed_experts
        if experts.expert_map is not None and not isinstance(experts.quant_method, UnquantizedFusedMoEMethod):
            raise ConfigurationRefused(
                "quantized experts cannot be divided between ranks yet; omit --enable-expert-parallel"
            )
        self.router = CpuRouter(self.router, experts.expert_map)


class CpuRouter(BaseRouter):
    """Routes by `Routing` where it has the rule, else by vLLM's router."""

    def __init__(self, router: Any, expert_map: torch.Tensor | None) -> None:
        """Replaces a router of vLLM.

        `expert_map` has the index of each expert on this rank, integers [experts], -1 if it is elsewhere;
        `None` if all experts are here.
        """
        super().__init__(router.top_k, router.global_num_experts, router.eplb_state)
        self._router = router
        self._routing = Routing.of(router)
        self._expert_map = expert_map

    @property
    def routing_method_type(self) -> RoutingMethodType:
        """See vLLM's router."""
        return self._router.routing_method_type

    def _compute_routing(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._routing is not None:
            weights, experts = self._routing.choose(router_logits)
        else:
            weights, experts = self._router._compute_routing(  # noqa: SLF001 - its part that we replace
                hidden_states, router_logits, indices_type, input_ids=input_ids
            )
        if self._expert_map is not None:
            weights, experts = localize(weights, experts, self._expert_map)
        return weights, experts.to(torch.int32)


def localize(
    weights: torch.Tensor, experts: torch.Tensor, expert_map: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replaces experts of other ranks by local experts with weight 0, since the kernels run every choice.

    A token with a local expert repeats that expert, so that no further weights are read.

    All are [tokens, top_k]; for `expert_map` see `CpuRouter`.
    """
    # Unlike an index, this has a static shape whatever the values are, so it can be recorded.
    local = expert_map.index_select(0, experts.flatten()).view(experts.shape)
    elsewhere = local < 0
    substitute = local.amax(dim=-1, keepdim=True).clamp_min(0)
    return weights.masked_fill(elsewhere, 0), torch.where(elsewhere, substitute, local)


class StaticMoeRunner(MoERunner):
    """An expert layer: the weighted sum of the chosen experts' gated MLPs, plus the shared experts.

    Tensor parallelism splits the inside of every expert. Expert parallelism gives each rank a range of
    experts, and every rank computes all tokens with its own. In both cases, each rank holds a part of the
    sum, also of the shared experts, and a single all-reduce adds the parts.
    """

    device: Device
    """Runs the experts; set after the model is built."""

    def __init__(self, layer_name: str, *args: Any, **kwargs: Any) -> None:
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


@cache
def replace_experts(*, has_kernels: bool) -> None:
    """Makes vLLM build these expert layers: those for its CPU kernels, or those of static shape."""
    MoERunner.register_oot(CpuMoeRunner if has_kernels else StaticMoeRunner)
