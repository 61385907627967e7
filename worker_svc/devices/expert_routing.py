"""Routing of tokens to experts, in plain operators of static shape."""

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

Scoring = Literal["softmax", "sigmoid"]

_ROUTERS = ("FusedTopKRouter", "FusedTopKBiasRouter", "GroupedTopKRouter", "CPURouter")
"""Names of vLLM's routers with a rule below."""
_OTHER_RULES = ("custom_routing_function", "_hash_indices_table", "bias_vl", "num_fused_shared_experts")
"""Attributes of those routers that select an unserved rule if set."""
# Keeps the sum of chosen weights away from zero if all sigmoids underflow.
_LEAST_SUM = 1e-20


@dataclass(frozen=True, eq=False)
class Routing:
    """A rule for each token's experts and their weights. Every expert belongs to a group."""

    top_k: int
    """Experts that a token uses."""
    scoring: Scoring
    """How logits become scores."""
    renormalize: bool
    """Whether the weights of a token add up to 1, before `scale`."""
    scale: float = 1.0
    """Factor of all weights."""
    bias: torch.Tensor | None = None
    """[experts], added to the scores to choose experts, but not to their weights."""
    groups: int = 1
    """Groups of consecutive experts, all of the same size."""
    chosen_groups: int = 1
    """Groups that a token's experts may come from."""

    @classmethod
    def of(cls, router: Any) -> "Routing | None":
        """Returns the rule of a router of vLLM's; `None` for any other rule."""
        scoring = getattr(router, "scoring_func", "")
        if type(router).__name__ not in _ROUTERS or scoring not in ("softmax", "sigmoid"):
            return None
        if any(getattr(router, attribute, None) for attribute in _OTHER_RULES):
            return None
        bias = getattr(router, "e_score_correction_bias", None)
        # vLLM's CPU router has these attributes for every rule.
        grouped = getattr(router, "use_grouped_topk", type(router).__name__ == "GroupedTopKRouter")
        groups = router.num_expert_group if grouped else 1
        if router.global_num_experts % groups or router.global_num_experts <= groups > 1:
            return None
        return cls(
            top_k=router.top_k,
            scoring=cast("Scoring", scoring),
            renormalize=router.renormalize,
            # Without groups and bias, vLLM's router for GPUs takes no factor.
            scale=router.routed_scaling_factor if grouped or bias is not None else 1.0,
            bias=bias,
            groups=groups,
            chosen_groups=router.topk_group if grouped else 1,
        )

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Chooses the experts of each token.

        Args:
            logits: the router's [tokens, experts].

        Returns:
            Weights, float32 [tokens, top_k], and expert ids, int64 [tokens, top_k].
        """
        logits = logits.float()
        if self.scoring == "softmax" and self.renormalize and self.bias is None and self.groups == 1:
            # A softmax over all experts would only be divided out again.
            highest, experts = logits.topk(self.top_k, dim=-1)
            return highest.softmax(dim=-1) * self.scale, experts
        scores = logits.softmax(dim=-1) if self.scoring == "softmax" else logits.sigmoid()
        experts = self._ranked(scores).topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, experts)
        if self.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(_LEAST_SUM)
        return weights * self.scale, experts

    def _ranked(self, scores: torch.Tensor) -> torch.Tensor:
        """Returns the values that rank experts: scores with the bias, `-inf` outside of the best groups."""
        ranked = scores if self.bias is None else scores + self.bias
        if self.groups == 1:
            return ranked
        by_group = ranked.view(ranked.shape[0], self.groups, -1)
        # As DeepSeek V3 does it with a bias and DeepSeek V2 without one.
        best = by_group.amax(dim=-1) if self.bias is None else by_group.topk(2, dim=-1).values.sum(dim=-1)
        chosen = best.topk(self.chosen_groups, dim=-1).indices
        closed = torch.ones_like(best).scatter(1, chosen, 0.0) != 0
        return by_group.masked_fill(closed.unsqueeze(-1), -torch.inf).view(ranked.shape)

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns each token's weights of all experts, float32 [tokens, experts]; 0 for unused experts."""
        weights, experts = self.choose(logits)
        return torch.zeros(logits.shape, device=logits.device).scatter(1, experts, weights)
