"""Model families that the ranks of a stage split in their own ways; `test_layouts.py` has the layouts."""

from pathlib import Path

import pytest
import torch

from tests.support.ranks.questions import PROMPTS, answers
from tests.support.ranks.replica import replica
from tests.support.reference import Reference
from tests.support.zoo import families

FLOAT32 = ("--dtype", "float32")
EXPERTS = ("--enable-expert-parallel",)

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.mark.parametrize(
    ("family", "pipeline", "flags"),
    [
        ("qwen3", 1, ()),
        ("mixtral", 1, ()),
        ("mixtral", 2, EXPERTS),
        ("qwen2-moe", 1, EXPERTS),
        ("glm4-moe", 1, EXPERTS),
        ("ernie-moe", 1, EXPERTS),
        ("gpt-oss", 1, ()),
        ("deepseek-v2", 1, EXPERTS),
    ],
)
def test_ranks_answer_like_one(family: str, pipeline: int, flags: tuple[str, ...], tmp_path: Path) -> None:
    """Greedy answers are those of transformers, and seeded ones those of a replica of one rank."""
    model = families.write(family, tmp_path / "model")
    with replica(model, tmp_path, tensor=2, pipeline=pipeline, flags=(*FLOAT32, *flags)) as running:
        divided = answers(running)
    reference = Reference(model, torch.float32)
    for prompt, tokens in zip(PROMPTS, divided, strict=False):
        assert reference.greedy_mismatch(prompt, tokens) == ""
    with replica(model, tmp_path, flags=FLOAT32) as running:
        assert answers(running) == divided
