"""Builds expert layers as ranks of a group would, in one process, and adds up the ranks' parts.

vLLM loads one platform per process, so a test runs the program for the device: it prints a JSON object
with the largest difference between each split layer and the whole one.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from tests.support.paths import ROOT
from worker_svc.devices import open_device
from worker_svc.devices.registry import DeviceName, DeviceOptions

TOKENS, HIDDEN, INNER, SHARED, EXPERTS = 7, 64, 64, 32, 6
PADDED = 3
"""A row of NaN, like a padded row of a step."""
ROUTINGS: dict[str, dict[str, Any]] = {
    "softmax": {"top_k": 2, "renormalize": True},
    "scaled groups": {
        "top_k": 3, "renormalize": True, "use_grouped_topk": True, "num_expert_group": 3, "topk_group": 2,
        "scoring_func": "sigmoid", "routed_scaling_factor": 2.5, "apply_routed_scale_to_output": True,
        "e_score_correction_bias": torch.linspace(-0.3, 0.3, EXPERTS),
    },
}  # fmt: skip
"""Arguments of vLLM's layers, by the name of the routing."""
SPLITS = {"tensor": (2, False), "experts": (2, True), "unequal experts": (4, True)}
"""Ranks and whether each has whole experts, by the name of the split."""


class SharedExperts(torch.nn.Module):
    """A part of an MLP, as a rank's linear layers would hold it."""

    def __init__(self, up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [tokens, hidden] to this rank's part of the result."""
        return (hidden @ self.up.t()).relu() @ self.down.t()


def whole_and_parts(device_name: DeviceName, routing: dict[str, Any]) -> dict[str, float]:
    """Returns the largest difference between the sum of the parts and the whole, by split."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator) / 8
        for name, shape in {
            "gate": (EXPERTS, INNER, HIDDEN), "up": (EXPERTS, INNER, HIDDEN), "down": (EXPERTS, HIDDEN, INNER),
            "shared up": (SHARED, HIDDEN), "shared down": (HIDDEN, SHARED),
        }.items()
    }  # fmt: skip
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    logits = torch.randn(TOKENS, EXPERTS, generator=generator)
    hidden[PADDED] = logits[PADDED] = torch.nan
    real = [token for token in range(TOKENS) if token != PADDED]

    def run(ranks: int, rank: int, experts: bool) -> torch.Tensor:
        layer = _layer(device_name, routing, weights, ranks, rank, experts=experts)
        with torch.inference_mode(), _forward_context(layer):
            output: torch.Tensor = layer(hidden.clone(), logits.clone())
            return output[real]

    whole = run(1, 0, False)
    assert float(whole.abs().max()) > 0.1
    differences = {}
    for split, (ranks, experts) in SPLITS.items():
        parts = torch.stack([run(ranks, rank, experts) for rank in range(ranks)])
        assert all(float((part - whole).abs().max()) > 0.01 for part in parts)
        differences[split] = float((parts.sum(dim=0) - whole).abs().max())
    return differences


_count = iter(range(1000))


def _layer(
    device_name: DeviceName, routing: dict[str, Any], weights: dict[str, torch.Tensor], ranks: int, rank: int,
    *, experts: bool,
) -> Any:  # fmt: skip
    """One rank's layer with its part of the weights, which vLLM's own loader cuts out."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import config as moe_config
    from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

    config = VllmConfig()
    config.parallel_config.enable_expert_parallel = experts
    part = slice(rank * SHARED // ranks, (rank + 1) * SHARED // ranks)
    shared = SharedExperts(weights["shared up"][part], weights["shared down"][:, part])
    with (
        set_current_vllm_config(config),
        mock.patch.object(moe_config, "get_tensor_model_parallel_rank", return_value=rank),
    ):
        layer = FusedMoEFactory(
            num_experts=EXPERTS, hidden_size=HIDDEN, intermediate_size=INNER, params_dtype=torch.float32,
            tp_size=ranks, dp_size=1, pcp_size=1, prefix=f"layer{next(_count)}", shared_experts=shared, **routing,
        )  # fmt: skip
    layer.device = open_device(device_name, DeviceOptions("rbln-check"))
    routed = layer.routed_experts
    for expert in range(EXPERTS):
        for name, shard, source in (
            ("w13_weight", "w1", "gate"),
            ("w13_weight", "w3", "up"),
            ("w2_weight", "w2", "down"),
        ):
            routed.weight_loader(getattr(routed, name), weights[source][expert], name, shard, expert)
    routed.quant_method.process_weights_after_loading(routed)
    return layer


@contextmanager
def _forward_context(layer: Any) -> Iterator[None]:
    """Lets one layer run outside of a model. The all-reduce is left to the caller, which has all parts."""
    from vllm.config import VllmConfig
    from vllm.forward_context import create_forward_context, override_forward_context
    from vllm.model_executor.layers.fused_moe.runner import moe_runner

    context: Any = create_forward_context({}, VllmConfig())
    context.no_compile_layers = {layer.layer_name: layer}
    with (
        override_forward_context(context),
        mock.patch.object(moe_runner, "tensor_model_parallel_all_reduce", lambda states: states),
    ):
        yield


def run_apart(device_name: DeviceName) -> dict[str, dict[str, float]]:
    """Returns the differences of `whole_and_parts` by routing, from a separate process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.experts.split_experts", device_name],
        check=False, capture_output=True, text=True, cwd=ROOT, timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main(device_name: DeviceName) -> None:
    """Runs the command."""
    from worker_svc.ranks.layout import RankLayout
    from worker_svc.vllm_adapter.startup import prepare

    prepare(device_name)
    if device_name == "cpu":
        from worker_svc.vllm_adapter.layers.moe import replace_experts

        replace_experts(has_kernels=True)
    # Not earlier: it imports vLLM.
    from worker_svc.vllm_adapter.building import set_groups

    set_groups(RankLayout())
    print(json.dumps({name: whole_and_parts(device_name, routing) for name, routing in ROUTINGS.items()}))


if __name__ == "__main__":
    main("cpu" if sys.argv[1] == "cpu" else "rbln")
