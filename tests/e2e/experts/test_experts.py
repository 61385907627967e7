"""Expert layers that are divided between ranks, and expert models in bfloat16."""

from pathlib import Path

import pytest
import torch

from tests.support import tiny_models
from tests.support.experts import split_experts
from tests.support.worker import parity_process
from tests.support.worker.parity_process import Job
from worker_svc.devices.registry import DeviceName
from worker_svc.settings import Backend

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing vLLM and transformers
]

BACKENDS: tuple[Backend, ...] = ("eager", "compiled")


@pytest.mark.parametrize("device_name", ["cpu", pytest.param("rbln", marks=pytest.mark.slow)])
def test_the_parts_of_ranks_add_up_to_the_whole_layer(device_name: DeviceName) -> None:
    """Split inside experts or by experts, the shared experts count once and a row of NaN stays alone."""
    differences = split_experts.run_apart(device_name)
    assert differences.keys() == split_experts.ROUTINGS.keys()
    for by_split in differences.values():
        assert by_split.keys() == split_experts.SPLITS.keys()
        assert all(difference < 1e-5 for difference in by_split.values())


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family == "mixtral" else [pytest.mark.slow])
        for family in tiny_models.EXPERT_FAMILIES
    ],
)
def test_recorded_expert_layers_equal_eager_ones_in_bfloat16(family: str, tmp_path: Path) -> None:
    """A recorded step of an expert model computes what its Python code computes, in the usual type too."""
    folder = tiny_models.write(family, tmp_path)
    prompts = parity_process.random_prompts()
    eager, recorded = (
        parity_process.run(Job(str(folder), prompts, backend=backend, dtype="bfloat16"))
        for backend in BACKENDS
    )
    assert [answer.tokens for answer in eager] == [answer.tokens for answer in recorded]
    for one, other in zip(eager, recorded, strict=True):
        assert [list(top) for top in one.top] == [list(top) for top in other.top]
        for values, others in zip(one.top, other.top, strict=True):
            assert torch.allclose(
                torch.tensor(list(values.values())), torch.tensor(list(others.values())), atol=1e-3
            )
