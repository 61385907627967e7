"""Expert layers on CPUs: vLLM's kernels run the experts, after our routing where possible.

Without groups, vLLM's router for CPUs ignores a correction bias and refuses sigmoids. Its kernels ignore
which experts are local. They write to tensors of static shape, so a step that uses them can be recorded.
"""

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from protos.errors import ConfigurationRefused
from worker_svc.devices.expert_routing import Routing


@MoERunner.register_oot
class CpuMoeRunner(MoERunner):
    """vLLM's expert layer with our router."""

    router: Any

    def __init__(self, layer_name: str, *args: Any, **kwargs: Any) -> None:
        """Takes vLLM's arguments.

        Raises:
            ConfigurationRefused: for quantized experts with expert parallelism.
        """
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

        Args:
            router: vLLM's.
            expert_map: integers [experts], the index of each expert on this rank, -1 if it is elsewhere;
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

    Args:
        weights: [tokens, top_k].
        experts: expert ids [tokens, top_k].
        expert_map: see `CpuRouter`.

    Returns:
        Weights and indices of local experts, both [tokens, top_k].
    """
    # Unlike an index, this has a static shape whatever the values are, so it can be recorded.
    local = expert_map.index_select(0, experts.flatten()).view(experts.shape)
    elsewhere = local < 0
    substitute = local.amax(dim=-1, keepdim=True).clamp_min(0)
    return weights.masked_fill(elsewhere, 0), torch.where(elsewhere, substitute, local)
