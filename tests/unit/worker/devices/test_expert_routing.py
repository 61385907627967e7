"""Routing rules against a token-by-token description of them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from worker_svc.devices.expert_routing import Routing

TOKENS, EXPERTS = 40, 8
BIAS = torch.linspace(-0.4, 0.4, EXPERTS)


def expected(rule: Routing, logits: list[float]) -> list[float]:
    """One token's weights of all experts, by sorting."""
    row = torch.tensor(logits)
    scores = (row.softmax(0) if rule.scoring == "softmax" else row.sigmoid()).tolist()
    ranks = [score + (0.0 if rule.bias is None else float(rule.bias[at])) for at, score in enumerate(scores)]
    size = EXPERTS // rule.groups
    groups = [sorted(ranks[start : start + size], reverse=True) for start in range(0, EXPERTS, size)]
    values = [sum(group[:2]) if rule.bias is not None else group[0] for group in groups]
    best = sorted(range(rule.groups), key=values.__getitem__, reverse=True)[: rule.chosen_groups]
    allowed = [expert for expert in range(EXPERTS) if expert // size in best]
    chosen = sorted(allowed, key=ranks.__getitem__, reverse=True)[: rule.top_k]
    total = sum(scores[expert] for expert in chosen) if rule.renormalize else 1.0
    return [rule.scale * scores[at] / total if at in chosen else 0.0 for at in range(EXPERTS)]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("bias", [None, BIAS])
@pytest.mark.parametrize(("groups", "chosen_groups"), [(1, 1), (4, 2), (2, 1)])
def test_each_rule_equals_its_description(
    scoring: Any, bias: torch.Tensor | None, groups: int, chosen_groups: int, *, renormalize: bool
) -> None:
    """Scores, bias, groups, renormalization and factor apply in the order in which the models define them."""
    logits = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(3)) * 2
    rule = Routing(3, scoring, renormalize, 1.5, bias, groups, chosen_groups)
    weights = rule.spread(logits)
    assert weights.dtype == torch.float32
    assert torch.allclose(weights, torch.tensor([expected(rule, row) for row in logits.tolist()]), atol=1e-6)
    assert ((weights != 0).sum(dim=1) == 3).all()
    values, experts = rule.choose(logits.bfloat16())
    assert values.dtype == torch.float32
    assert torch.equal(
        rule.spread(logits.bfloat16()), torch.zeros(TOKENS, EXPERTS).scatter(1, experts, values)
    )


def test_scores_that_underflow_give_zeros() -> None:
    """A token without any affinity gets no expert's output, instead of NaN."""
    assert torch.equal(
        Routing(2, "sigmoid", True).spread(torch.full((1, EXPERTS), -1000.0)),
        torch.zeros(1, EXPERTS),
    )


def router(kind: str, **attributes: Any) -> Any:
    common = {"top_k": 2, "global_num_experts": EXPERTS, "renormalize": True, "scoring_func": "softmax"}
    return type(kind, (SimpleNamespace,), {})(**common | attributes)


@pytest.mark.parametrize(
    "other",
    [
        router("CustomRoutingRouter"),
        router("FusedTopKRouter", scoring_func="sqrtsoftplus"),
        router("FusedTopKBiasRouter", _hash_indices_table=object()),
        router("FusedTopKBiasRouter", num_fused_shared_experts=1),
        router("CPURouter", use_grouped_topk=False, custom_routing_function=len),
        router("GroupedTopKRouter", num_expert_group=3, topk_group=1),
        router("GroupedTopKRouter", num_expert_group=EXPERTS, topk_group=1),
    ],
    ids=lambda other: type(other).__name__,
)
def test_other_rules_are_not_taken_for_these(other: Any) -> None:
    """A router with another rule, or with groups that do not divide its experts, has no `Routing`."""
    assert Routing.of(other) is None


def test_a_factor_without_groups_and_bias_is_not_the_routers() -> None:
    """A CPU router has a factor in all cases; vLLM's router for GPUs then has none."""
    plain = Routing.of(router("CPURouter", use_grouped_topk=False, routed_scaling_factor=2.5))
    grouped = Routing.of(
        router(
            "CPURouter", use_grouped_topk=True, num_expert_group=4, topk_group=2, routed_scaling_factor=2.5
        )
    )
    assert plain is not None
    assert grouped is not None
    assert (plain.scale, plain.groups) == (1.0, 1)
    assert (grouped.scale, grouped.groups, grouped.chosen_groups) == (2.5, 4, 2)
