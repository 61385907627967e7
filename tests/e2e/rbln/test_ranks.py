"""Replicas of several ranks on device rbln, with the vendor's packages."""

from pathlib import Path

import pytest
import torch

from tests.support import tiny_models
from tests.support.ranks.replica import replica
from tests.support.rbln.vendor_packages import environment
from tests.support.reference import Reference

# Shorter and longer than a chunk.
PROMPTS = ([3, 9, 27, 81], [40 + place % 90 for place in range(70)])
COUNT = 12
CHECK = ("--rbln-backend", "rbln-check")
META = {"VLLM_RBLN_USE_DEVICE_TENSOR": "0"}

pytestmark = [pytest.mark.e2e, pytest.mark.npu, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.mark.parametrize(
    ("family", "tensor", "pipeline", "flags", "variables"),
    [
        ("llama", 2, 1, (), {}),
        ("llama", 2, 1, (), META),
        ("llama", 1, 2, (), {}),
        ("llama", 2, 2, CHECK, {}),
        ("gemma3", 2, 1, (), {"RBLN_USE_CUSTOM_KERNEL": "1"}),
        ("mixtral", 2, 1, ("--enable-expert-parallel",), {}),
    ],
)
def test_ranks_answer_like_transformers(
    family: str, tensor: int, pipeline: int, flags: tuple[str, ...], variables: dict[str, str], tmp_path: Path
) -> None:
    """Collectives are in the graphs; the fake compiler refuses those whose group it is not told."""
    model = tiny_models.write(family, tmp_path / "model")
    with replica(
        model, tmp_path, tensor=tensor, pipeline=pipeline, device="rbln",
        flags=("--dtype", "float32", *flags), scheduler_flags=("--block-size", "1024"),
        variables=environment(**variables),
    ) as running:  # fmt: skip
        answers = running.generate_all(PROMPTS, COUNT, {"temperature": 0.0})
    reference = Reference(model, torch.float32)
    for prompt, tokens in zip(PROMPTS, answers, strict=True):
        assert reference.greedy_mismatch(prompt, tokens) == ""
