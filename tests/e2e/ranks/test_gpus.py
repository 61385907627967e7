"""Ranks on GPUs give the tokens of one rank on one GPU. Stages of a pipeline may share a GPU."""

from pathlib import Path

import pytest
import torch

from tests.support import tiny_models
from tests.support.ranks.questions import answers
from tests.support.ranks.replica import replica

GPUS = torch.cuda.device_count()
FLAGS = ("--dtype", "float32", "-O", "1")
EXPERTS = ("--enable-expert-parallel",)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not GPUS, reason="needs a GPU, and CI has none; docs/ranks.md says what ran where"),
]


@pytest.mark.parametrize(
    ("family", "tensor", "pipeline", "flags"),
    [
        ("llama", 1, 2, ()),
        ("gemma3", 1, 2, ()),
        ("llama", 2, 1, ()),
        ("mixtral", 2, 1, ()),
        ("mixtral", 2, 1, EXPERTS),
        ("llama", 2, 2, ()),
    ],
)
def test_ranks_on_gpus_answer_like_one(
    family: str, tensor: int, pipeline: int, flags: tuple[str, ...], tmp_path: Path
) -> None:
    if tensor > GPUS:
        pytest.skip(f"ranks of a stage need their own GPUs: {tensor}, and there are {GPUS}")
    model = tiny_models.write(family, tmp_path / "model")
    with replica(
        model, tmp_path, tensor=tensor, pipeline=pipeline, device="cuda", flags=(*FLAGS, *flags)
    ) as running:
        divided = answers(running)
    with replica(model, tmp_path, device="cuda", flags=FLAGS) as running:
        assert answers(running) == divided
